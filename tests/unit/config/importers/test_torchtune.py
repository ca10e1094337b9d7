"""Configs of torchtune: each key is mapped or reported, and the tokens of the rows are those of torchtune."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from tests.helpers.chat_families import write_family
from tests.helpers.imported_runs import localize, train
from tests.unit.config.importers.conftest import Import, values
from tunekit.cli import recipe_loader, registry
from tunekit.config.load import load_config
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.importers import imported
from tunekit.importers.torchtune.model import hub_name
from tunekit.importers.torchtune.packaged import find_counterpart

WHEEL = "torchtune==0.6.1"
LORA = """
# This config assumes a download of the model:
#   tune download meta-llama/Llama-3.2-1B-Instruct --output-dir /tmp/Llama-3.2-1B --ignore-patterns "original/*"
# To launch on 2 devices:
#   tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_2/1B_lora
output_dir: /tmp/runs
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 64
  lora_alpha: 128
  lora_dropout: 0.0
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/t.model, max_seq_len: 512}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/Llama-3.2-1B/
  checkpoint_files: [model.safetensors]
  output_dir: ${output_dir}
  model_type: LLAMA3_2
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: False}
seed: null
shuffle: True
batch_size: 4
optimizer: {_component_: torch.optim.AdamW, fused: True, weight_decay: 0.01, lr: 3e-4}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
epochs: 2
max_steps_per_epoch: 50
gradient_accumulation_steps: 8
clip_grad_norm: null
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: p, log_dir: "${output_dir}/logs"}
log_every_n_steps: 1
device: cuda
dtype: bf16
enable_activation_checkpointing: True
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: False, cpu: True, wait_steps: 5}
"""


def test_lora_config_trains_as_the_original(import_text: Import) -> None:
    result = import_text(LORA)
    assert result.draft.recipe == "sft" and result.trainer == "torchtune"
    assert values(result, "model", "output_dir") == ["meta-llama/Llama-3.2-1B-Instruct", "/tmp/runs"]
    assert values(result, "global_batch_size", "micro_batch_size") == [4 * 8 * 2, 4]  # the command has two processes
    assert values(result, "epochs", "max_steps", "max_grad_norm") == [2, 100, 0]
    assert result.draft.get("adapter") == {
        "kind": "lora", "rank": 64, "alpha": 128, "target_modules": ["q_proj", "v_proj", "o_proj", "mlp"]
    }  # fmt: skip
    assert result.draft.get("optimizer") == {"kind": "adamw", "lr": 3e-4, "betas": [0.9, 0.999], "weight_decay": 0.01}
    assert values(result, "lr_scheduler.kind", "lr_scheduler.warmup_steps") == ["cosine", 100]
    assert result.draft.get("report_to") == [{"kind": "wandb", "project": "p"}]
    assert result.draft.launch == ["--nproc-per-node", "2"]
    assert not [finding for finding in result.draft.findings if finding.effect == "not mapped"]


def test_the_only_download_is_the_model_without_a_checkpointer(import_text: Import) -> None:
    start, _, rest = LORA.partition("checkpointer:\n")
    text = start.replace("1B-Instruct", "1B") + rest[rest.index("dataset:") :]
    assert values(import_text(text), "model") == ["meta-llama/Llama-3.2-1B"]


def test_overrides_and_unknown_keys(import_text: Import) -> None:
    overrides = [
        "optimizer=bitsandbytes.optim.PagedAdamW8bit",
        "~optimizer.fused",
        "model.quantize_base=True",
        "epochs=1",
    ]
    overrides += ["dataset=torchtune.datasets.chat_dataset", "dataset.source=owner/chats"]
    overrides += ["dataset.conversation_column=talk", "dataset.conversation_style=sharegpt", "optimizer.amsgrad=True"]
    overrides += ["no_such_key=3", "tokenizer.max_seq_len=null", "profiler.enabled=True", "profiler.with_flops=True"]
    result = import_text(LORA, overrides)
    assert values(result, "optimizer.kind", "quantization.kind", "epochs") == ["adamw8bit", "nf4", 1]
    assert values(result, "data.kind", "data.source", "profiler.skip_first") == ["sharegpt", "owner/chats", 8]
    assert result.draft.get("data.columns") == {"conversations": "talk"}
    dropped = {finding.key for finding in result.draft.findings if finding.effect == "not mapped"}
    assert dropped == {"optimizer.amsgrad", "no_such_key", "profiler.with_flops"}
    assert "#   no_such_key: 3" in result.text
    with pytest.raises(UserError, match="no key 'optimizer.nothing'"):
        import_text(LORA, ["~optimizer.nothing"])


ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:\n"
)


def llama3_pieces(prompt: str, answer: str) -> list[str]:
    def turn(role: str, text: str) -> list[str]:
        return ["<|start_header_id|>", role, "<|end_header_id|>", f"\n\n{text.strip()}", "<|eot_id|>"]

    return ["<|begin_of_text|>", *turn("user", prompt), *turn("assistant", answer)]


def qwen_pieces(prompt: str, answer: str) -> list[str]:
    user = ["<|im_start|>", "user\n", prompt, "<|im_end|>", "\n"]
    return [*user, "<|im_start|>", "assistant\n", answer, "<|im_end|>"]


def phi_pieces(prompt: str, answer: str) -> list[str]:
    return ["<|user|>", "\n", prompt, "<|end|>", "<|assistant|>", "\n", answer, "<|end|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("family", "builder", "pieces"),
    [
        ("llama3", "llama3.llama3_tokenizer", llama3_pieces),
        ("qwen2", "qwen2_5.qwen2_5_tokenizer", qwen_pieces),
        ("phi3", "phi3.phi3_mini_tokenizer", phi_pieces),
        ("gemma2", "gemma.gemma_tokenizer", lambda prompt, answer: ["<bos>", prompt + answer, "<eos>"]),
        (
            "inst",
            "mistral.mistral_tokenizer",
            lambda prompt, answer: ["<s>", f"[INST] {prompt} [/INST] {answer}", "</s>"],
        ),
    ],
)
def test_alpaca_rows_have_the_tokens_of_torchtune(family, builder, pieces, import_text: Import, tmp_path: Path) -> None:
    """torchtune tokenizes the parts of a conversation one by one, with its own markers, and trains on all of them."""
    result = import_text(LORA, [f"tokenizer=torchtune.models.{builder}"])
    tree = result.draft.tree | {"data": localize(result.draft.get("data"), tmp_path)}
    config = load_config(recipe_loader.load_recipe("sft").CONFIG, yaml.safe_dump(tree)).data
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    tokenizer = config.prepare_tokenizer(Tokenizer.open(write_family(directory, family)))
    row = {"instruction": "Add.", "input": "2 and 2", "output": "It is 4."}
    ((document,),) = config.encode_rows(tokenizer, [Row("rows:1", row)])
    text = "".join(pieces(ALPACA, "It is 4."))
    assert tokenizer.model.decode([*document.tokens], skip_special_tokens=False).replace(" ", "") == text.replace(
        " ", ""
    )
    if family in ("llama3", "qwen2"):  # whose special tokens do not change the text next to them
        encoded = [tokenizer.model.encode(piece, add_special_tokens=False).ids for piece in pieces(ALPACA, "It is 4.")]
        assert [*document.tokens] == [token for ids in encoded for token in ids]
    assert document.loss_mask[1:].all()


def test_methods_without_a_counterpart_are_named(import_text: Import) -> None:
    with pytest.raises(UserError, match="quantization-aware training is not available"):
        import_text(
            LORA + "quantizer: {_component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer}\n"
        )
    with pytest.raises(UserError, match="trains on images"):
        import_text(LORA, ["dataset=torchtune.datasets.multimodal.the_cauldron_dataset"])
    with pytest.raises(UserError, match="unknown dataset builder 'own_dataset'"):
        import_text(LORA, ["dataset=my.own_dataset"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_2/1B_lora_single_device", ("sft", "llama3_2/1b_lora", ())),
        ("llama3_2/8B_to_1B_KD_lora_single_device", ("distill", "llama3_2/1b_distill", None)),
        ("llama3_1/8B_lora_dpo_single_device", ("preference", "llama3_2/1b_dpo_lora", None)),
        ("qwen2_5/7B_full", ("sft", "qwen2_5/7b_lora", ("adapter=none", "optimizer.lr=2e-5"))),
        ("gemma/7B_lora", ("sft", "gemma/2b_lora", ("model=google/gemma-7b",))),
        ("mistral/7B_full_ppo_low_memory", ("ppo", "mistral/7b_ppo_full", ())),
        ("generation", ("generate", "nano/generate", None)),
    ],
)
def test_packaged_names_have_the_nearest_config(name: str, expected: tuple) -> None:
    counterpart = find_counterpart(name, registry.list_configs())
    assert (counterpart.recipe, counterpart.config) == expected[:2]
    assert expected[2] is None or counterpart.overrides == expected[2]
    path = registry.find_config(counterpart.config)
    load_config(recipe_loader.load_recipe(counterpart.recipe).CONFIG, path, counterpart.overrides)


def test_overrides_of_packaged_configs_are_translated() -> None:
    words, draft = imported.translate_torchtune_overrides(
        ["batch_size=4", "optimizer.lr=1e-4", "~optimizer.fused", "own=1"], recipe_loader.keys_of_recipe
    )
    assert words == ["global_batch_size=32", "micro_batch_size=4", "optimizer.lr=0.0001"]
    assert [finding.key for finding in draft.findings] == ["own"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configs of torchtune's wheel, from TORCHTUNE_WHEEL or the package index."""
    directory = tmp_path_factory.mktemp("torchtune")
    if (file := os.environ.get("TORCHTUNE_WHEEL")) is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory), WHEEL]
        done = subprocess.run(command, capture_output=True, timeout=120)
        wheels = [*directory.glob("*.whl")]
        if done.returncode or not wheels:
            pytest.skip("the package index cannot be reached")
        file = wheels[0]
    with ZipFile(file) as wheel:
        wheel.extractall(directory, [name for name in wheel.namelist() if name.endswith(".yaml")])
    return directory / "recipes/configs"


def test_published_configs_are_imported_or_refused(published: Path) -> None:
    counts = {"imported": 0, "refused": 0}
    for path in sorted(published.rglob("*.yaml")):
        try:
            result = imported.import_file(path, (), None, None, recipe_loader.keys_of_recipe)
        except UserError as error:
            assert any(reason in str(error) for reason in ("images", "text only", "not available", "tune export")), path
            counts["refused"] += 1
            continue
        load_config(recipe_loader.load_recipe(result.draft.recipe).CONFIG, result.text)
        dropped = {finding.key for finding in result.draft.findings if finding.effect == "not mapped"}
        assert dropped <= {"stop_token_ids"}, path
        counts["imported"] += 1
    assert counts == {"imported": 138, "refused": 18}


@pytest.mark.parametrize(
    "name", ["llama3_2/1B_lora_single_device", "llama3_1/8B_full_dpo", "mistral/7B_full_ppo_low_memory"]
)
def test_published_configs_train(name: str, published: Path, tiny_model: Path, tmp_path: Path) -> None:
    result = imported.import_file(published / f"{name}.yaml", (), None, None, recipe_loader.keys_of_recipe)
    assert len(train(result.draft, tiny_model, tmp_path)) == 2


@pytest.mark.parametrize(
    ("builder", "name"),
    [
        *((f"qwen2_{size}b", f"Qwen2-{size.replace('_', '.')}B") for size in ("0_5", "1_5", "7")),
        *((f"qwen2_5_{size}b", f"Qwen2.5-{size.replace('_', '.')}B") for size in ("0_5", "3")),
        *(
            (f"qwen2_5_{size}b_{kind}", f"Qwen2.5-{size.replace('_', '.')}B{end}")
            for size in ("1_5", "7", "14", "32", "72")
            for kind, end in (("base", ""), ("instruct", "-Instruct"))
        ),
        *(
            (f"qwen3_{size}b_{kind}", f"Qwen3-{size.replace('_', '.')}B{end}")
            for size in ("0_6", "1_7", "4", "8", "14")
            for kind, end in (("base", "-Base"), ("instruct", ""))
        ),
        ("qwen3_32b", "Qwen3-32B"),
    ],
)
def test_builders_of_qwen_name_their_models(builder: str, name: str) -> None:
    for prefix in ("", "lora_"):
        assert hub_name(f"torchtune.models.qwen.{prefix}{builder}") == f"Qwen/{name}"


@pytest.mark.parametrize(
    ("builder", "options", "source"),
    [
        ("wikitext_dataset", {}, "EleutherAI/wikitext_document_level:wikitext-103-v1"),
        ("wikitext_dataset", {"subset": "small"}, "EleutherAI/wikitext_document_level:small"),
        ("wikitext_dataset", {"source": "o/w", "subset": "small"}, "o/w:small"),
        ("wikitext_dataset", {"source": "o/w"}, "o/w:wikitext-103-v1"),
        ("text_completion_dataset", {"source": "o/w", "name": "small"}, "o/w:small"),
        ("cnn_dailymail_articles_dataset", {"source": "o/c"}, "o/c:3.0.0"),
        ("cnn_dailymail_articles_dataset", {"source": "json", "data_files": "rows.jsonl"}, "rows.jsonl"),
        ("gsm8k_sft", {"name": "main"}, "openai/gsm8k:main"),
        ("alpaca_dataset", {}, "tatsu-lab/alpaca"),
    ],
)
def test_subsets_of_sources(builder: str, options: dict, source: str, import_text: Import) -> None:
    config = yaml.safe_load(LORA) | {"dataset": {"_component_": f"torchtune.datasets.{builder}", **options}}
    assert import_text(yaml.safe_dump(config)).draft.get("data.source") == source


METHODS = """
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/m}
reward_checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/r}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss: {_component_: torchtune.rlhf.loss.PPOLoss}\ndataset: {source: o/r}",
         {"loss.cliprange": 0.1, "loss.cliprange_value": 0.2, "loss.vf_coef": 0.1}),
        ("loss: {_component_: torchtune.dev.rl.loss.GRPOSimpleLoss}\n"
         "dataset: {_component_: torchtune.dev.rl.gsm8k.gsm8k_dataset, split: test}",
         {"loss.beta": 0.1, "loss.epsilon": 0.1, "data.source": "openai/gsm8k:main", "data.split": "test"}),
        ("loss: {_component_: torchtune.rlhf.loss.SimPOLoss}\n"
         "dataset: {_component_: torchtune.datasets.preference_dataset, source: o/r}",
         {"loss.beta": 2.0, "loss.simpo_gamma": 0.5}),
        ("loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n"
         "dataset: {_component_: torchtune.datasets.preference_dataset, source: o/r}", {"loss.beta": 0.1}),
    ],
)  # fmt: skip
def test_losses_have_the_defaults_of_torchtune(text: str, expected: dict, import_text: Import) -> None:
    result = import_text(METHODS + text)
    assert {key: result.draft.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [
        ("torch.optim.AdamW", 0.01), ("torch.optim.Adam", None), ("torch.optim.SGD", None),
        ("bitsandbytes.optim.AdamW8bit", 0.01), ("bitsandbytes.optim.PagedAdamW", 0.01),
        ("bitsandbytes.optim.Adam8bit", None), ("bitsandbytes.optim.PagedAdam8bit", None),
        ("bitsandbytes.optim.PagedAdam", None), ("torch.optim.Muon", 0.1),
    ],
)  # fmt: skip
def test_optimizers_have_their_weight_decay(optimizer: str, decay: float | None, import_text: Import) -> None:
    config = yaml.safe_load(LORA) | {"optimizer": {"_component_": optimizer, "lr": 1e-4}}
    assert import_text(yaml.safe_dump(config)).draft.get("optimizer.weight_decay") == decay


def test_values_of_an_unexpected_type_are_errors_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(LORA.replace("packed: False", "column_map: x"))
    keys = recipe_loader.keys_of_recipe
    command = ["tune", "run", "lora_finetune_single_device", "--config", str(path)]
    for run in (
        lambda: imported.import_file(path, (), None, None, keys),
        lambda: imported.import_command(command, None, keys),
        lambda: imported.import_torchtune_run(str(path), (), None, None, keys),
        lambda: imported.translate_torchtune_overrides(["dataset.column_map=x"], keys),
    ):
        with pytest.raises(UserError, match="unexpected type"):
            run()
