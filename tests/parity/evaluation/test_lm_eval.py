"""lm-evaluation-harness gives the same results with our adapter as with its transformers model."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tests.helpers import harness_tasks
from tunekit import assets, build
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.evaluation import lm_eval_adapter
from tunekit.evaluation.evaluation_rows import EvaluationRow
from tunekit.evaluation.generation_eval import GenerationEvaluator
from tunekit.evaluation.results import TaskResult
from tunekit.evaluation.tasks import TaskSelection, task_documents
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization

NANO = assets.MODELS["tunekit/nano"]


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness_tasks.write(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def isolated_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # collecting environment information is slow


@pytest.fixture(scope="module")
def hf_model() -> Any:
    return make_hf_model(NANO)


@pytest.fixture(scope="module")
def adapter_model() -> lm_eval_adapter.LMEvalAdapter:
    return make_adapter_model("tunekit/nano")


def make_hf_model(directory: Path) -> Any:
    """The transformers model of the harness."""
    model_class: Any = HFLM
    return model_class(pretrained=str(directory), dtype="float32", device="cpu", batch_size=4)


def make_adapter_model(name: str) -> lm_eval_adapter.LMEvalAdapter:
    dist = DistributedContext.single_process()
    return lm_eval_adapter.LMEvalAdapter(*build.load_for_inference(name, PrecisionConfig("fp32"), dist), 4, dist, name)


def evaluate(
    model: lm_eval_adapter.LMEvalAdapter,
    task_dir: Path,
    *names: str,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat=False,
) -> dict[str, TaskResult]:
    tasks = lm_eval_adapter.load_tasks(names, num_fewshot, str(task_dir))
    return {result.task: result for result in lm_eval_adapter.evaluate_tasks(model, names, tasks, limit, chat)}


@pytest.mark.parametrize("chat", [False, True])
def test_metrics_match_transformers(
    hf_model: Any, adapter_model: lm_eval_adapter.LMEvalAdapter, task_dir: Path, chat: bool
) -> None:
    tasks = TaskManager(include_path=str(task_dir), include_defaults=False)
    options: dict[str, Any] = {
        "apply_chat_template": chat,
        "fewshot_as_multiturn": chat,
        "num_fewshot": 2 if chat else None,
    }
    expected: Any = evaluator.simple_evaluate(
        hf_model, tasks=[*harness_tasks.TASKS], task_manager=tasks, bootstrap_iters=0, **options
    )
    actual = evaluate(adapter_model, task_dir, *harness_tasks.TASKS, num_fewshot=options["num_fewshot"], chat=chat)
    results = expected["results"]
    for task, names in {"sums": ("acc", "acc_norm"), "said": ("exact_match",)}.items():
        for name in names:
            assert actual[task][name].value == results[task][f"{name},none"]
            values = [row[name] for row in sorted(expected["samples"][task], key=lambda row: row["doc_id"])]
            assert list(actual[task][name].values) == values
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert actual["read"][name].value == pytest.approx(results["read"][f"{name},none"], rel=1e-5)
        assert actual["read"][name].higher_is_better is False
    rows = sorted(expected["samples"]["sums"], key=lambda row: row["doc_id"])
    assert list(actual["sums"]["acc"].rows) == [row["doc_hash"] for row in rows]
    assert len(set(actual["sums"]["acc"].rows)) > 5
    samples = sorted(expected["samples"]["said"], key=lambda row: row["doc_id"])
    assert list(actual["said"].answers) == [row["resps"][0][0] for row in samples]
    assert actual["sums"].answers == actual["read"].answers == ()
    assert 0 < results["sums"]["acc,none"] < 1
    assert chat == (results["said"]["exact_match,none"] > 0), "the nano model answers only with its chat template"


def test_likelihoods_and_answers_match_transformers(
    hf_model: Any, adapter_model: lm_eval_adapter.LMEvalAdapter, task_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_model, "max_length", 64)
    monkeypatch.setattr(hf_model, "_max_length", 64)
    tasks = lm_eval_adapter.load_tasks([*harness_tasks.TASKS], 3, str(task_dir))["tasks"]
    for task in tasks.values():
        task.build_all_requests(rank=0, world_size=1)
        kind = task.instances[0].request_type
        expected, actual = (
            getattr(model, kind)(task.instances, disable_tqdm=True) for model in (hf_model, adapter_model)
        )
        if kind == "loglikelihood":
            assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
            expected, actual = ([logp for logp, _ in pairs] for pairs in (expected, actual))
        if kind == "generate_until":
            assert actual == expected
            assert all("." not in text for text in actual)
        else:
            assert actual == pytest.approx(expected, abs=1e-4, rel=1e-6)


def test_repetition_penalty_matches_transformers(hf_model: Any, adapter_model: lm_eval_adapter.LMEvalAdapter) -> None:
    answers = []
    for penalty in (1.0, 1.8):
        options = {"until": ["."], "max_gen_toks": 12, "repetition_penalty": penalty}
        requests = [Instance("generate_until", {}, ("What is the cat called? The cat is", options), 0, ("a", 0, 1))]
        answers.append(adapter_model.generate_until(requests))
        assert answers[-1] == hf_model.generate_until(requests, disable_tqdm=True)
    assert answers[0] != answers[1]


def copy_without_bos(directory: Path) -> Path:
    """Copy of the nano model whose tokenizer adds no BOS token, like Qwen's."""
    shutil.copytree(NANO, directory)
    (directory / "special_tokens_map.json").unlink()
    for name, key in (("tokenizer.json", "post_processor"), ("tokenizer_config.json", "bos_token")):
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(config | {key: None}))
    return directory


@pytest.mark.parametrize("has_bos", [True, False])
def test_empty_texts_match_transformers_or_are_errors(has_bos: bool, tmp_path: Path) -> None:
    """Requests that crash the transformers model are errors that name the row."""
    directory = NANO if has_bos else copy_without_bos(tmp_path / "model")
    hf_model, adapter_model = make_hf_model(directory), make_adapter_model(str(directory))
    texts, options = ("", " ", "one", "one ", "<|begin|>", "<|begin|>two"), {"until": ["."], "max_gen_toks": 5}
    requests: list[tuple[Any, ...]] = [*product(texts, texts), ("one", " two" * adapter_model.max_length)]
    requests += [(text,) for text in texts] + [(text, options) for text in texts]
    refused = []
    for args in requests:
        kind = "generate_until" if options in args else "loglikelihood" if len(args) > 1 else "loglikelihood_rolling"
        request = Instance(kind, {}, args, 0, ("sums", 3, 1))
        try:
            (expected,) = getattr(hf_model, kind)([request], disable_tqdm=True)
        except (AssertionError, IndexError, RuntimeError):
            refused.append(args)
            with pytest.raises(UserError, match="tasks: row 3 of sums.*Fix the row"):
                getattr(adapter_model, kind)([request])
            continue
        (actual,) = getattr(adapter_model, kind)([request])
        assert (
            actual == expected if kind == "generate_until" else actual == pytest.approx(expected, rel=1e-5, abs=1e-4)
        ), args
    assert ("", "") in refused and ("one", "") in refused and len(refused) < len(requests) / 3
    assert has_bos == (("", options) not in refused)


LIMIT = 6  # rows of a task


@pytest.mark.parametrize("quantized", [False, True])
def test_adapter_matches_peft(task_dir: Path, tmp_path: Path, quantized: bool) -> None:
    """With the base model as stored, or in the 4 bits of bitsandbytes."""
    torch.manual_seed(0)
    base_model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    lora_config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base_model, lora_config).save_pretrained(str(tmp_path / "adapter"))
    quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    options = {"quantization_config": quantization_config} if quantized else {}
    base = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32, **options)
    model: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    model_class: Any = HFLM
    hf_model = model_class(model, tokenizer=AutoTokenizer.from_pretrained(NANO), batch_size=4)
    # In training mode, bitsandbytes uses the same algorithm on CPU and GPU. There is no dropout.
    hf_model.model.train()
    run, quantization = DistributedContext.single_process(), NF4Config() if quantized else NoQuantization()
    adapter_model = lm_eval_adapter.LMEvalAdapter(
        *build.load_for_inference(str(tmp_path / "adapter"), PrecisionConfig("fp32"), run, quantization),
        4,
        run,
        "adapter",
    )
    tasks = TaskManager(include_path=str(task_dir), include_defaults=False)
    expected: Any = evaluator.simple_evaluate(
        hf_model, tasks=["sums", "read"], task_manager=tasks, bootstrap_iters=0, limit=LIMIT
    )
    actual = evaluate(adapter_model, task_dir, "sums", "read", limit=LIMIT)
    assert actual["sums"]["acc"].value == expected["results"]["sums"]["acc,none"]
    assert actual["read"]["bits_per_byte"].value == pytest.approx(
        expected["results"]["read"]["bits_per_byte,none"], rel=1e-4
    )


def test_bundled_rows_are_identified_by_location(adapter_model: lm_eval_adapter.LMEvalAdapter) -> None:
    """Rows without target tokens or answers have no metrics."""
    evaluator = GenerationEvaluator(
        adapter_model.model, adapter_model.text_tokenizer, SamplingConfig(max_new_tokens=4), 4, adapter_model.dist
    )
    rows = task_documents("nano/facts", adapter_model.text_tokenizer, 3)
    unmasked = rows[1].document
    no_targets = EvaluationRow("nothing", unmasked._replace(loss_mask=np.zeros_like(unmasked.loss_mask)))
    complete, with_gap = evaluator("facts", rows)[1], evaluator("facts", [rows[0], no_targets, rows[2]])[1]
    for actual, expected in ((complete, [1, 2, 3]), (with_gap, [1, 3])):
        assert list(actual["loss"].rows) == [f"nano/facts row {n}" for n in expected]
        assert actual["exact_match"].rows == actual["loss"].rows
    assert evaluator("facts", [no_targets])[1] == TaskResult("facts", ())


def test_fewshot_examples_are_the_same_for_each_model(
    adapter_model: lm_eval_adapter.LMEvalAdapter, task_dir: Path
) -> None:
    """Few-shot examples of the second model are those of the first."""
    first, second = (evaluate(adapter_model, task_dir, "sums", "said", num_fewshot=2, chat=True) for _ in range(2))
    assert first == second


def test_invalid_tasks_are_errors(
    adapter_model: lm_eval_adapter.LMEvalAdapter, task_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_task_manager(include: str | None, include_defaults: bool = True) -> TaskManager:
        return TaskManager(include_path=include, include_defaults=False)  # the default tasks take long to load

    monkeypatch.setattr(lm_eval_adapter, "task_manager", make_task_manager)
    with pytest.raises(UserError, match="^tasks: .*'sumz'.*'sums'"):
        TaskSelection(("sumz",), include_path=str(task_dir)).check()
    with pytest.raises(UserError, match="include_path: nowhere is not a directory"):
        TaskSelection(("sums",), include_path="nowhere").check()
    (task_dir / "warm.yaml").write_text((task_dir / "said.yaml").read_text().replace("task: said", "task: warm"))
    text = (task_dir / "warm.yaml").read_text().replace("do_sample: false", "do_sample: true, typical_p: 0.5")
    (task_dir / "warm.yaml").write_text(text)
    with pytest.raises(UserError, match="typical_p in generation_kwargs"):
        evaluate(adapter_model, task_dir, "warm", limit=2)
    (task_dir / "warm.yaml").write_text(text + "unsafe_code: true\n")
    with pytest.raises(UserError, match="warm runs code"):
        TaskSelection(("warm",), include_path=str(task_dir)).load()
    (task_dir / "warm.yaml").write_text(text.replace("rows.jsonl", "gone.jsonl"))
    with pytest.raises(UserError, match="cannot evaluate warm: .*gone.jsonl"):
        TaskSelection(("warm",), include_path=str(task_dir)).load()

    def raise_connection_error(*_: object) -> None:
        raise ConnectionError("Couldn't reach 'warm' on the Hub")

    monkeypatch.setattr(TaskManager, "load", raise_connection_error)
    with pytest.raises(UserError, match="cannot evaluate warm: Couldn't reach .*`include_path`"):
        TaskSelection(("warm",), include_path=str(task_dir)).load()
