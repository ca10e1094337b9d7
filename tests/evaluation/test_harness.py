"""Tasks in the harness' own format come out on our decoder as they do on its transformers model."""

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

from tests.evaluation import own
from tunekit import assets, build
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.evaluation import bundled_tasks, lm_eval_adapter
from tunekit.evaluation.generation_eval import GenerationEvaluator
from tunekit.evaluation.results import TaskResult
from tunekit.evaluation.tasks import TaskSelection
from tunekit.generation.generate import SamplingConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization

NANO = assets.MODELS["tunekit/nano"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own.write(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # what it tells of the machine takes long


@pytest.fixture(scope="module")
def theirs() -> Any:
    return reference(NANO)


@pytest.fixture(scope="module")
def ours() -> lm_eval_adapter.LMEvalAdapter:
    return asker("tunekit/nano")


def reference(folder: Path) -> Any:
    """The harness' own model of transformers; a checker does not see what its class is told."""
    make: Any = HFLM
    return make(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)


def asker(name: str) -> lm_eval_adapter.LMEvalAdapter:
    run = DistributedContext.alone()
    return lm_eval_adapter.LMEvalAdapter(*build.load_for_inference(name, PrecisionConfig("fp32"), run), 4, run, name)


def asked(
    model: lm_eval_adapter.LMEvalAdapter,
    folder: Path,
    *names: str,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat=False,
) -> dict[str, TaskResult]:
    opened = lm_eval_adapter.load_tasks(names, num_fewshot, str(folder))
    return {one.task: one for one in lm_eval_adapter.evaluate_tasks(model, names, opened, limit, chat)}


@pytest.mark.parametrize("chat", [False, True])
def test_figures_are_those_of_transformers(
    theirs: Any, ours: lm_eval_adapter.LMEvalAdapter, folder: Path, chat: bool
) -> None:
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    how: dict[str, Any] = {
        "apply_chat_template": chat,
        "fewshot_as_multiturn": chat,
        "num_fewshot": 2 if chat else None,
    }
    wanted: Any = evaluator.simple_evaluate(theirs, tasks=[*own.TASKS], task_manager=tasks, bootstrap_iters=0, **how)
    found = asked(ours, folder, *own.TASKS, num_fewshot=how["num_fewshot"], chat=chat)
    results = wanted["results"]
    for task, names in {"sums": ("acc", "acc_norm"), "said": ("exact_match",)}.items():
        for name in names:
            assert found[task][name].value == results[task][f"{name},none"]
            values = [row[name] for row in sorted(wanted["samples"][task], key=lambda row: row["doc_id"])]
            assert list(found[task][name].values) == values
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert found["read"][name].value == pytest.approx(results["read"][f"{name},none"], rel=1e-5)
        assert found["read"][name].higher is False
    rows = sorted(wanted["samples"]["sums"], key=lambda row: row["doc_id"])
    assert list(found["sums"]["acc"].rows) == [row["doc_hash"] for row in rows]
    assert len(set(found["sums"]["acc"].rows)) > 5
    said = sorted(wanted["samples"]["said"], key=lambda row: row["doc_id"])
    assert list(found["said"].answers) == [row["resps"][0][0] for row in said]
    assert found["sums"].answers == found["read"].answers == ()
    assert 0 < results["sums"]["acc,none"] < 1
    assert chat == (results["said"]["exact_match,none"] > 0), "the nano answers where it is asked as it was taught"


def test_likelihoods_and_answers_are_those_of_transformers(
    theirs: Any, ours: lm_eval_adapter.LMEvalAdapter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "max_length", 64)
    monkeypatch.setattr(theirs, "_max_length", 64)
    tasks = lm_eval_adapter.load_tasks([*own.TASKS], 3, str(folder))["tasks"]
    for task in tasks.values():
        task.build_all_requests(rank=0, world_size=1)
        kind = task.instances[0].request_type
        wanted, found = (getattr(model, kind)(task.instances, disable_tqdm=True) for model in (theirs, ours))
        if kind == "loglikelihood":
            assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
            wanted, found = ([one for one, _ in pairs] for pairs in (wanted, found))
        if kind == "generate_until":
            assert found == wanted
            assert all("." not in text for text in found)
        else:
            assert found == pytest.approx(wanted, abs=1e-4, rel=1e-6)


def unbegun(folder: Path) -> Path:
    """The nano with a tokenizer that puts nothing before a text, as that of Qwen."""
    shutil.copytree(NANO, folder)
    (folder / "special_tokens_map.json").unlink()
    for name, key in (("tokenizer.json", "post_processor"), ("tokenizer_config.json", "bos_token")):
        told = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(told | {key: None}))
    return folder


@pytest.mark.parametrize("begun", [True, False])
def test_texts_that_are_empty_count_as_with_transformers_or_are_refused(begun: bool, tmp_path: Path) -> None:
    """Where its model breaks off, the request is named."""
    folder = NANO if begun else unbegun(tmp_path / "model")
    theirs, ours = reference(folder), asker(str(folder))
    texts, short = ("", " ", "one", "one ", "<|begin|>", "<|begin|>two"), {"until": ["."], "max_gen_toks": 5}
    asked: list[tuple[Any, ...]] = [*product(texts, texts), ("one", " two" * ours.max_length)]
    asked += [(text,) for text in texts] + [(text, short) for text in texts]
    refused = []
    for words in asked:
        kind = "generate_until" if short in words else "loglikelihood" if len(words) > 1 else "loglikelihood_rolling"
        request = Instance(kind, {}, words, 0, ("sums", 3, 1))
        try:
            (wanted,) = getattr(theirs, kind)([request], disable_tqdm=True)
        except (AssertionError, IndexError, RuntimeError):
            refused.append(words)
            with pytest.raises(UserError, match="tasks: row 3 of sums.*Fix the row"):
                getattr(ours, kind)([request])
            continue
        (found,) = getattr(ours, kind)([request])
        assert found == wanted if kind == "generate_until" else found == pytest.approx(wanted, abs=1e-4), words
    assert ("", "") in refused and ("one", "") in refused and len(refused) < len(asked) / 3
    assert begun == (("", short) not in refused)


@pytest.mark.parametrize("bits", [False, True])
def test_an_adapter_is_asked_as_peft_has_it(folder: Path, tmp_path: Path, bits: bool) -> None:
    """On its base as it is, or in the four bits of bitsandbytes."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    made = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(plain, made).save_pretrained(str(tmp_path / "adapter"))
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    how = {"quantization_config": packed} if bits else {}
    base = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32, **how)
    model: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    make: Any = HFLM
    theirs = make(model, tokenizer=AutoTokenizer.from_pretrained(NANO), batch_size=4)
    theirs.model.train()  # in which bitsandbytes works on a CPU as on a GPU; nothing here is dropped
    run, form = DistributedContext.alone(), NF4Config() if bits else NoQuantization()
    ours = lm_eval_adapter.LMEvalAdapter(
        *build.load_for_inference(str(tmp_path / "adapter"), PrecisionConfig("fp32"), run, form), 4, run, "adapter"
    )
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    wanted: Any = evaluator.simple_evaluate(theirs, tasks=["sums", "read"], task_manager=tasks, bootstrap_iters=0)
    found = asked(ours, folder, "sums", "read")
    assert found["sums"]["acc"].value == wanted["results"]["sums"]["acc,none"]
    assert found["read"]["bits_per_byte"].value == pytest.approx(
        wanted["results"]["read"]["bits_per_byte,none"], rel=1e-4
    )


def test_rows_of_our_own_are_known_by_where_they_are_from(ours: lm_eval_adapter.LMEvalAdapter) -> None:
    """Also where there is nothing to score or to answer, and so no figure."""
    ask = GenerationEvaluator(ours.model, ours.text_tokenizer, SamplingConfig(max_new_tokens=4), 4, ours.run)
    rows = bundled_tasks.task_documents("nano/facts", ours.text_tokenizer, 3)
    silent = rows[1][1]._replace(learnt=np.zeros_like(rows[1][1].loss_mask))
    first, second = ask("facts", rows)[1], ask("facts", [rows[0], ("nothing", silent), rows[2]])[1]
    for found, wanted in ((first, [1, 2, 3]), (second, [1, 3])):
        assert list(found["loss"].rows) == [f"nano/facts row {n}" for n in wanted]
        assert found["exact_match"].rows == found["loss"].rows
    assert ask("facts", [("nothing", silent)])[1] == TaskResult("facts", ())


def test_another_model_is_asked_the_same(ours: lm_eval_adapter.LMEvalAdapter, folder: Path) -> None:
    """Examples in front of its questions are those of the first."""
    one, other = (asked(ours, folder, "sums", "said", num_fewshot=2, chat=True) for _ in range(2))
    assert one == other


def test_what_is_asked_wrongly(
    ours: lm_eval_adapter.LMEvalAdapter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(include: str | None, include_defaults: bool = True) -> TaskManager:
        return TaskManager(include_path=include, include_defaults=False)  # the others take long to read

    monkeypatch.setattr(lm_eval_adapter, "task_manager", few)
    with pytest.raises(UserError, match="tasks: unknown task 'sumz'. Did you mean 'sums'"):
        TaskSelection(("sumz",), include_path=str(folder)).check()
    with pytest.raises(UserError, match="include_path: nowhere is not a directory"):
        TaskSelection(("sums",), include_path="nowhere").check()
    (folder / "warm.yaml").write_text((folder / "said.yaml").read_text().replace("task: said", "task: warm"))
    text = (folder / "warm.yaml").read_text().replace("do_sample: false", "do_sample: true, typical_p: 0.5")
    (folder / "warm.yaml").write_text(text)
    with pytest.raises(UserError, match="typical_p in generation_kwargs"):
        asked(ours, folder, "warm", limit=2)
    (folder / "warm.yaml").write_text(text + "unsafe_code: true\n")
    with pytest.raises(UserError, match="warm runs code"):
        TaskSelection(("warm",), include_path=str(folder)).load()
    (folder / "warm.yaml").write_text(text.replace("rows.jsonl", "gone.jsonl"))
    with pytest.raises(UserError, match="cannot evaluate warm: .*gone.jsonl"):
        TaskSelection(("warm",), include_path=str(folder)).load()

    def cut_off(*_: object) -> None:
        raise ConnectionError("Couldn't reach 'warm' on the Hub")

    monkeypatch.setattr(TaskManager, "load", cut_off)
    with pytest.raises(UserError, match="cannot evaluate warm: Couldn't reach .*`include_path`"):
        TaskSelection(("warm",), include_path=str(folder)).load()
