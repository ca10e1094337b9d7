"""The model card of a run: metadata for the Hub, contents that match the run, and no secrets."""

import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from PIL import Image

from tests.helpers.random_checkpoints import FP32, load_model, make_checkpoint
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.config.dump import to_plain_config
from tunekit.config.load import load_config
from tunekit.data.dataloader import build
from tunekit.data.dataloader.mixture import Mixture, MixtureMember
from tunekit.data.datasets import ChatDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.loggers import metrics_file
from tunekit.optim.config import AdamWConfig
from tunekit.publishing import model_card
from tunekit.quantization.config import NF4Config
from tunekit.recipes import sft

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STEPS = 4


def write_rows(file: Path, start: int, count: int) -> str:
    conversations = [[{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": f"w{i + 1} w{i}"}]
             for i in range(start, start + count)]  # fmt: skip
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return str(file)


def make_config(folder: Path, **changes: Any) -> sft.SFTConfig:
    """Small run on a base model in the Hub cache."""
    base = folder / "hub/models--acme--tiny/snapshots" / COMMIT
    if not base.is_dir():
        make_checkpoint(base, "llama3.2")
        (base / "README.md").write_text(
            "---\nlicense: apache-2.0\nlicense_link: LICENSE\n---\n\n# The card of the base\n"
        )
    options = {"adapter": LoRAConfig(4), "eval_data": ChatDataset(write_rows(folder / "held.jsonl", 30, 3))} | changes
    return sft.SFTConfig(
        model=str(base),
        data=ChatDataset(write_rows(folder / "rows.jsonl", 0, 6)),
        output_dir=str(folder / "runs/my-run"),
        optimizer=AdamWConfig(lr=1e-2),
        precision=FP32,
        device="cpu",
        global_batch_size=3,
        micro_batch_size=3,
        max_steps=STEPS,
        eval_every=2,
        **options,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished LoRA run. Tests that change it use `run_copy`."""
    folder = tmp_path_factory.mktemp("card")
    sft.main(make_config(folder))
    return folder / "runs/my-run"


@pytest.fixture
def run_copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "my-run")


def read_text(folder: Path) -> str:
    return (folder / "README.md").read_text("utf-8")


def read_metadata(folder: Path) -> dict[str, Any]:
    """Metadata as the Hub client parses it."""
    return huggingface_hub.ModelCard.load(folder / "README.md").data.to_dict()


def row_cells(folder: Path, name: str) -> list[str]:
    """Cells of the table row `first`, without the first cell."""
    row = next(row for row in read_text(folder).splitlines() if row.startswith(f"| {name} |"))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_metadata_names_base_license_and_library(run: Path) -> None:
    assert read_metadata(run / "final") == {
        "base_model": "acme/tiny",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "license_link": "https://huggingface.co/acme/tiny/blob/main/LICENSE",
        "tags": ["tunekit", "sft", "lora"],
    }
    assert f"https://huggingface.co/acme/tiny/tree/{COMMIT}" in read_text(run / "final")
    assert "The card of the base" not in read_text(run / "final")


def test_losses_match_the_metrics_file(run: Path) -> None:
    eval_losses = {line["step"]: line["eval/loss"] for line in metrics_file.read_metrics(run) if "eval/loss" in line}
    assert list(eval_losses) == [0, 2, 4]
    assert eval_losses[0] != eval_losses[4]
    losses = row_cells(run / "final", "loss on held-out rows, in nats per target token")
    assert [float(number) for number in losses] == pytest.approx([eval_losses[0], eval_losses[4]], abs=1e-4)
    assert [float(number) for number in row_cells(run / "final", "perplexity")] == pytest.approx(
        [math.exp(eval_losses[0]), math.exp(eval_losses[4])], rel=1e-3
    )


def test_data_section_has_counts_and_hashes(run: Path) -> None:
    folder = run.parent.parent
    loader = build.build_dataloader(
        ChatDataset(str(folder / "rows.jsonl")),
        Tokenizer.open(Path(make_config(folder).model)),
        3,
        3,
        DistributedContext(0, "cpu"),
    )
    summary = loader.summary
    assert row_cells(run / "final", "data") == [
        "`rows.jsonl`",
        "train",
        "6",
        str(summary.tokens),
        str(summary.num_target_tokens),
    ]
    for key, name in (("data", "rows.jsonl"), ("eval_data", "held.jsonl")):
        expected = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert f"| {key} | `{name}` | `{expected}` |" in read_text(run / "final")


def test_training_section_has_parameter_counts_and_options(run: Path) -> None:
    folder = run.parent.parent
    model = load_model(Path(make_config(folder).model), LoRAConfig(4))
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_base = sum(p.numel() for p in model.parameters()) - num_trained
    (method,) = row_cells(run / "final", "trained")
    assert method.startswith("lora, rank 4, alpha 32, target_modules all-linear")
    assert f"{num_trained:,} parameters" in method and f"{num_base:,}" in method
    assert row_cells(run / "final", "steps") == [str(STEPS)]
    tokens = max(line["num_tokens"] for line in metrics_file.read_metrics(run) if "loss" in line)
    assert row_cells(run / "final", "tokens")[0].startswith(f"{tokens:,}, of which")
    assert row_cells(run / "final", "optimizer") == ["adamw, lr 0.01, betas 0.9 0.95, eps 1e-08"]
    assert row_cells(run / "final", "seed") == ["0"]
    assert "| loss |  |" not in read_text(run / "final"), "the loss has no options"
    assert f"torch {torch.__version__}" in row_cells(run / "final", "versions")[0]


def test_loss_curve_is_a_png(run: Path) -> None:
    assert "](curves.png)" in read_text(run / "final")
    with Image.open(run / "final/curves.png") as image:
        assert image.format == "PNG"
        assert image.width > 800


def test_verification_is_reported(run: Path) -> None:
    result = verify.read_verification(run / "final")
    assert result is not None
    assert result["passed"]
    assert row_cells(run / "final", "top-1 agreement") == [f"100.0% of {result['tokens']}"]
    line = metrics_file.read_metrics(run)[-1]
    assert line == {
        "step": STEPS,
        "verify/max_logit_diff": 0.0,
        "verify/mean_logit_diff": 0.0,
        "verify/top1_agreement": 1.0,
    }


def test_config_in_the_card_reproduces_the_run(run: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", read_text(run / "final"), re.S)
    assert "tune run sft config.yaml" in read_text(run / "final")
    (tmp_path / "config.yaml").write_text(block)
    loaded, original = load_config(sft.SFTConfig, tmp_path / "config.yaml"), make_config(run.parent.parent)
    assert loaded == replace(
        original,
        model=COMMIT,
        data=replace(original.data, source="rows.jsonl"),
        eval_data=replace(original.eval_data, source="held.jsonl"),
        output_dir="my-run",
    )


def run_snippet(folder: Path, paths: dict[str, Path]) -> dict[str, Any]:
    """Run the code of a card after replacing model names by paths."""
    (code,) = re.findall(r"```python\n(.*?)```", read_text(folder), re.S)
    for name, path in paths.items():
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', f'"{path}"')
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace


def test_code_in_the_card_runs(run: Path) -> None:
    namespace = run_snippet(
        run / "final", {"acme/tiny": Path(make_config(run.parent.parent).model), "my-run": run / "final"}
    )
    assert type(namespace["model"]).__name__.startswith("Peft")
    assert len(namespace["answer"]) > 0
    assert "tune chat my-run" in read_text(run / "final")


def test_qlora_card_loads_a_quantized_base(tmp_path: Path) -> None:
    sft.main(make_config(tmp_path, quantization=NF4Config(double_quant=True)))
    final = tmp_path / "runs/my-run/final"
    code = re.findall(r"^```python\n(.*?)^```", read_text(final), re.M | re.S)[0]
    options = re.search(r"BitsAndBytesConfig\((.*)\)", code).group(1)
    expected = "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True"
    assert options.replace('"', "'") == expected
    assert 'from_pretrained("acme/tiny", quantization_config=bits)' in code
    compile(code, "card", "exec")


def test_card_of_a_full_model(tmp_path: Path) -> None:
    sft.main(make_config(tmp_path, adapter=NoAdapter(), eval_data=None))
    final = tmp_path / "runs/my-run/final"
    metadata = read_metadata(final)
    assert (metadata["base_model_relation"], metadata["library_name"], metadata["tags"]) == (
        "finetune",
        "transformers",
        ["tunekit", "sft"],
    )
    assert row_cells(final, "trained")[0].startswith("all ")
    assert "held-out" not in read_text(final)
    assert len(run_snippet(final, {"my-run": final})["answer"]) > 0


def test_model_with_random_init_has_no_base(tmp_path: Path) -> None:
    sft.main(make_config(tmp_path, adapter=NoAdapter(), eval_data=None, init="random"))
    final = tmp_path / "runs/my-run/final"
    assert {"base_model", "base_model_relation", "license"}.isdisjoint(read_metadata(final))
    assert "from random weights" in read_text(final)


def test_card_contains_no_secrets_and_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home/alice"))
    monkeypatch.setenv("HF_TOKEN", "hf_never_show_me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "opensesame")
    folder = tmp_path / "home/alice"
    folder.mkdir(parents=True)
    cfg = make_config(folder)
    sft.main(cfg)
    source, run = HFCheckpoint.open(Path(cfg.model)), Path(cfg.output_dir)
    data = build.build_dataloader(cfg.data, Tokenizer.open(source.path), 3, 3, DistributedContext(0, "cpu"))
    service = {"kind": "mlflow", "uri": "https://alice:opensesame@mlflow.example.com?token=hf_never_show_me"}
    extra = {"log": {"every": 1, "to": [service]}, "note": f"see {folder}/notes.txt", "name": "hf_never_show_me"}
    info = model_card.ModelCardInfo(
        "sft",
        to_plain_config(cfg, "sft") | extra,
        run,
        source,
        load_model(source.path, LoRAConfig(4)),
        {"data": data},
        torch.device("cpu"),
    )
    model_card.write_model_card(run / "final", info)
    card = read_text(run / "final")
    for secret in ("hf_never_show_me", "opensesame", "alice", str(tmp_path), "home"):
        assert secret not in card
    assert "https://mlflow.example.com" in card
    assert contains_none(run / "final/curves.png", b"alice", str(tmp_path).encode())


def contains_none(file: Path, *words: bytes) -> bool:
    return not any(word in file.read_bytes() for word in words)


def test_hub_datasets_are_listed(tmp_path: Path) -> None:
    cfg = make_config(tmp_path)
    rows = build.build_dataloader(cfg.data, Tokenizer.open(Path(cfg.model)), 3, 3, DistributedContext(0, "cpu"))
    plain = to_plain_config(replace(cfg, data=replace(cfg.data, source="acme/chats:part")), "sft")
    info = SimpleNamespace(config=plain, loaders={"data": rows, "eval_data": None})
    assert model_card.hub_datasets(info) == ["acme/chats"]
    assert f"| data | all tokens | `{rows.documents.fingerprint}` |" in model_card.data_section(info)


def test_all_datasets_of_a_mixture_are_listed(tmp_path: Path) -> None:
    cfg = make_config(tmp_path)
    mix = Mixture(
        (MixtureMember(cfg.data, repeat=2), MixtureMember(replace(cfg.data, split="train[:1]"))),
        max_length=cfg.data.max_length,
    )
    rows = build.build_dataloader(mix, Tokenizer.open(Path(cfg.model)), 3, 3, DistributedContext(0, "cpu"))
    plain = to_plain_config(replace(cfg, data=mix), "sft")
    lines = model_card.data_section(SimpleNamespace(config=plain, loaders={"data": rows})).splitlines()
    name = Path(cfg.data.source).name
    assert [line.split(" | ")[1:3] for line in lines[2:4]] == [[f"`{name}`", "train"], [f"`{name}`", "train[:1]"]]
    assert lines[2].split(" | ")[3] == str(2 * len(rows.datasets[0]))


def test_evaluation_results_are_added(run_copy: Path, tmp_path: Path) -> None:
    results = [{"model": "base", "loss": 2.0, "perplexity": 7.389, "correct": 0, "answers": ["no"]},
             {"model": str(run_copy), "loss": 1.0, "perplexity": 2.718, "correct": 3, "answers": ["yes"]}]  # fmt: skip
    before = read_text(run_copy / "final")
    for _ in range(2):
        model_card.add_evaluation(run_copy, "held.jsonl (test)", results, 4)
        assert row_cells(run_copy / "final", "on held.jsonl (test)") == ["loss", "perplexity", "exact_match"]
        assert row_cells(run_copy / "final", "base") == ["2.0000", "7.389", "0.0% (0 of 4)"]
        assert row_cells(run_copy / "final", "my-run") == ["1.0000", "2.718", "75.0% (3 of 4)"]
    assert "yes" not in (run_copy / "evaluation.json").read_text()
    (run_copy / "evaluation.json").unlink()
    model_card.update_evaluation(run_copy)
    assert read_text(run_copy / "final") == before
    (run_copy / "final/README.md").write_text("my own words")
    model_card.add_evaluation(run_copy, "held.jsonl", results, 4)
    assert read_text(run_copy / "final") == "my own words"
    model_card.add_evaluation(tmp_path, "held.jsonl", results, 4)
    assert not (tmp_path / "evaluation.json").exists(), "not a run directory"


def test_unverified_model_has_a_warning(run_copy: Path) -> None:
    final = run_copy / "final"
    verify.VerificationResult("model and files", math.nan, 0.4, 0.4, 0.5, 99, 1e-4, False).write(final)
    metadata = read_metadata(final)
    for _ in range(2):
        model_card.add_unverified_warning(final)
        assert read_text(final).count(model_card.WARNING) == 1
    assert read_text(final).index(model_card.WARNING) < read_text(final).index("# my-run")
    assert read_text(final).count("failed the comparison") == 2, "in the warning and in the section on verification"
    assert read_metadata(final) == metadata
    before = read_text(final)
    assert before[before.index("## Repeat") :] and "This check" not in before
    (final / verify.FILE).unlink()
    (final / "README.md").unlink()
    model_card.add_unverified_warning(final)
    assert "not compared" in read_text(final)
    assert read_metadata(final)["library_name"] == "peft"


def test_minimal_card_of_a_merged_model(run_copy: Path) -> None:
    source = HFCheckpoint.open(Path(make_config(run_copy.parent).model))
    folder = shutil.copytree(source.path, run_copy.parent / "merged")
    verify.VerificationResult("base and files", 0.4, 0.1, 0.0, 0.99, 99, 1e-4, True).write(folder)
    model_card.write_minimal_card(folder, source)
    metadata = read_metadata(folder)
    assert (metadata["base_model"], metadata["base_model_relation"], metadata["license"]) == (
        "acme/tiny",
        "merge",
        "apache-2.0",
    )
    assert row_cells(folder, "largest difference") == ["0.4"]
    assert len(run_snippet(folder, {"merged": folder})["answer"]) > 0


def test_front_matter_is_yaml(run: Path) -> None:
    head = re.match(r"---\n(.*?)\n---\n", read_text(run / "final"), re.S)
    assert head is not None
    assert yaml.safe_load(head[1]) == read_metadata(run / "final")


def test_diverged_run_has_a_warning() -> None:
    losses = [5.0, None, 9.0, 30.0, 31.0, 29.0]
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    assert "5 at the start to 29.5" in model_card.divergence_warning([{"step": 0, "eval/loss": 1.0}, *lines])
    assert model_card.divergence_warning(lines[:3]) == model_card.divergence_warning([]) == ""
