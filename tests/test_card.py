"""The card that a run leaves: what the Hub and people read in it is true, and it tells no secret."""

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

from tests.checkpoints import FP32, made, ours
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
from tunekit.loggers import metric_logger
from tunekit.optim.config import AdamWConfig
from tunekit.publishing import model_card
from tunekit.quantization.config import NF4Config
from tunekit.recipes import sft

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STEPS = 4


def rows(file: Path, first: int, count: int) -> str:
    turns = [[{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": f"w{i + 1} w{i}"}]
             for i in range(first, first + count)]  # fmt: skip
    file.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return str(file)


def config(folder: Path, **changes: Any) -> sft.SFTConfig:
    """A small run on a base from the Hub's cache."""
    base = folder / "hub/models--acme--tiny/snapshots" / COMMIT
    if not base.is_dir():
        made(base, "llama3.2")
        (base / "README.md").write_text(
            "---\nlicense: apache-2.0\nlicense_link: LICENSE\n---\n\n# The card of the base\n"
        )
    choices = {"adapter": LoRAConfig(4), "eval_data": ChatDataset(rows(folder / "held.jsonl", 30, 3))} | changes
    return sft.SFTConfig(
        model=str(base),
        data=ChatDataset(rows(folder / "rows.jsonl", 0, 6)),
        output_dir=str(folder / "runs/my-run"),
        optimizer=AdamWConfig(lr=1e-2),
        precision=FP32,
        device="cpu",
        global_batch_size=3,
        micro_batch_size=3,
        max_steps=STEPS,
        eval_every=2,
        **choices,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished LoRA run. Tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("card")
    sft.main(config(folder))
    return folder / "runs/my-run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "my-run")


def text(folder: Path) -> str:
    return (folder / "README.md").read_text("utf-8")


def front(folder: Path) -> dict[str, Any]:
    """What the Hub's own client reads at the head."""
    return huggingface_hub.ModelCard.load(folder / "README.md").data.to_dict()


def cells(folder: Path, first: str) -> list[str]:
    """The cells behind the first one of a table's row."""
    line = next(line for line in text(folder).splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_hub_reads_what_it_is(run: Path) -> None:
    assert front(run / "final") == {
        "base_model": "acme/tiny",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "license_link": "https://huggingface.co/acme/tiny/blob/main/LICENSE",
        "tags": ["tunekit", "sft", "lora"],
    }
    assert f"https://huggingface.co/acme/tiny/tree/{COMMIT}" in text(run / "final")
    assert "The card of the base" not in text(run / "final")


def test_losses_before_and_after_are_those_of_the_metrics(run: Path) -> None:
    held = {line["step"]: line["eval/loss"] for line in metric_logger.read_metrics(run) if "eval/loss" in line}
    assert list(held) == [0, 2, 4]
    assert held[0] != held[4]
    shown = cells(run / "final", "loss on held-out rows, in nats per learnt token")
    assert [float(number) for number in shown] == pytest.approx([held[0], held[4]], abs=1e-4)
    assert [float(number) for number in cells(run / "final", "perplexity")] == pytest.approx(
        [math.exp(held[0]), math.exp(held[4])], rel=1e-3
    )


def test_data_have_counts_and_hashes(run: Path) -> None:
    folder = run.parent.parent
    data = build.build_dataloader(
        ChatDataset(str(folder / "rows.jsonl")),
        Tokenizer.open(Path(config(folder).model)),
        3,
        3,
        DistributedContext(0, "cpu"),
    )
    report = data.report
    assert cells(run / "final", "data") == ["`rows.jsonl`", "train", "6", str(report.tokens), str(report.learnt)]
    for key, name in (("data", "rows.jsonl"), ("eval_data", "held.jsonl")):
        wanted = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert f"| {key} | `{name}` | `{wanted}` |" in text(run / "final")


def test_counts_and_choices(run: Path) -> None:
    folder = run.parent.parent
    model = ours(Path(config(folder).model), LoRAConfig(4))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in model.parameters()) - trained
    (told,) = cells(run / "final", "trained")
    assert told.startswith("lora, rank 4, alpha 32, target_modules all-linear")
    assert f"{trained:,} parameters beside the {whole:,} of the base" in told
    assert cells(run / "final", "steps") == [str(STEPS)]
    tokens = max(line["num_tokens"] for line in metric_logger.read_metrics(run) if "loss" in line)
    assert cells(run / "final", "tokens")[0].startswith(f"{tokens:,}, of which")
    assert cells(run / "final", "optimizer") == ["adamw, lr 0.01, betas 0.9 0.95, eps 1e-08"]
    assert cells(run / "final", "seed") == ["0"]
    assert "| loss |  |" not in text(run / "final"), "it has no options"
    assert f"torch {torch.__version__}" in cells(run / "final", "versions")[0]


def test_the_picture_is_there(run: Path) -> None:
    assert "](curves.png)" in text(run / "final")
    with Image.open(run / "final/curves.png") as image:
        assert image.format == "PNG"
        assert image.width > 800


def test_verification_is_told(run: Path) -> None:
    found = verify.read_verification(run / "final")
    assert found is not None
    assert found["passed"]
    assert cells(run / "final", "same likeliest token") == [f"100.0% of {found['tokens']}"]
    line = metric_logger.read_metrics(run)[-1]
    assert line == {
        "step": STEPS,
        "verify/max_logit_diff": 0.0,
        "verify/mean_logit_diff": 0.0,
        "verify/top1_agreement": 1.0,
    }


def test_the_config_in_it_runs_again(run: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", text(run / "final"), re.S)
    assert "tune run sft config.yaml" in text(run / "final")
    (tmp_path / "config.yaml").write_text(block)
    there, meant = load_config(sft.SFTConfig, tmp_path / "config.yaml"), config(run.parent.parent)
    assert there == replace(
        meant,
        model=COMMIT,
        data=replace(meant.data, source="rows.jsonl"),
        eval_data=replace(meant.eval_data, source="held.jsonl"),
        output_dir="my-run",
    )


def snippet(folder: Path, names: dict[str, Path]) -> dict[str, Any]:
    """Run the code of a card, with folders in place of the names in it."""
    (code,) = re.findall(r"```python\n(.*?)```", text(folder), re.S)
    for name, place in names.items():
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', f'"{place}"')
    space: dict[str, Any] = {}
    exec(code, space)
    return space


def test_the_code_in_it_works(run: Path) -> None:
    space = snippet(run / "final", {"acme/tiny": Path(config(run.parent.parent).model), "my-run": run / "final"})
    assert type(space["model"]).__name__.startswith("Peft")
    assert len(space["answer"]) > 0
    assert "tune chat my-run" in text(run / "final")


def test_an_adapter_beside_four_bits_is_opened_beside_four_bits(tmp_path: Path) -> None:
    sft.main(config(tmp_path, quantization=NF4Config(double_quant=True)))
    final = tmp_path / "runs/my-run/final"
    code = re.findall(r"^```python\n(.*?)^```", text(final), re.M | re.S)[0]
    given = re.search(r"BitsAndBytesConfig\((.*)\)", code).group(1)
    wanted = "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True"
    assert given.replace('"', "'") == wanted
    assert 'from_pretrained("acme/tiny", quantization_config=bits)' in code
    compile(code, "card", "exec")


def test_a_whole_model(tmp_path: Path) -> None:
    sft.main(config(tmp_path, adapter=NoAdapter(), eval_data=None))
    final = tmp_path / "runs/my-run/final"
    told = front(final)
    assert (told["base_model_relation"], told["library_name"], told["tags"]) == (
        "finetune",
        "transformers",
        ["tunekit", "sft"],
    )
    assert cells(final, "trained")[0].startswith("all ")
    assert "held-out" not in text(final)
    assert len(snippet(final, {"my-run": final})["answer"]) > 0


def test_what_begins_with_random_weights_has_no_base(tmp_path: Path) -> None:
    sft.main(config(tmp_path, adapter=NoAdapter(), eval_data=None, init="random"))
    final = tmp_path / "runs/my-run/final"
    assert {"base_model", "base_model_relation", "license"}.isdisjoint(front(final))
    assert "from random weights" in text(final)


def test_it_tells_no_secret_and_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home/alice"))
    monkeypatch.setenv("HF_TOKEN", "hf_never_show_me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "opensesame")
    folder = tmp_path / "home/alice"
    folder.mkdir(parents=True)
    cfg = config(folder)
    sft.main(cfg)
    source, run = HFCheckpoint.open(Path(cfg.model)), Path(cfg.output_dir)
    data = build.build_dataloader(cfg.data, Tokenizer.open(source.path), 3, 3, DistributedContext(0, "cpu"))
    service = {"kind": "mlflow", "uri": "https://alice:opensesame@mlflow.example.com?token=hf_never_show_me"}
    extra = {"log": {"every": 1, "to": [service]}, "note": f"see {folder}/notes.txt", "name": "hf_never_show_me"}
    told = model_card.ModelCardInfo(
        "sft",
        to_plain_config(cfg, "sft") | extra,
        run,
        source,
        ours(source.path, LoRAConfig(4)),
        {"data": data},
        torch.device("cpu"),
    )
    model_card.write_model_card(run / "final", told)
    found = text(run / "final")
    for secret in ("hf_never_show_me", "opensesame", "alice", str(tmp_path), "home"):
        assert secret not in found
    assert "https://mlflow.example.com" in found
    assert secret_free(run / "final/curves.png", b"alice", str(tmp_path).encode())


def secret_free(file: Path, *words: bytes) -> bool:
    return not any(word in file.read_bytes() for word in words)


def test_data_sets_of_the_hub_are_named(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    rows = build.build_dataloader(cfg.data, Tokenizer.open(Path(cfg.model)), 3, 3, DistributedContext(0, "cpu"))
    plain = to_plain_config(replace(cfg, data=replace(cfg.data, source="acme/chats:part")), "sft")
    told = SimpleNamespace(config=plain, rows={"data": rows, "eval_data": None})
    assert model_card.hub_sets(told) == ["acme/chats"]
    assert f"| data | all tokens | `{rows.rows.digest}` |" in model_card.data(told)


def test_every_source_of_a_mix_is_told(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    mix = Mixture(
        (MixtureMember(cfg.data, repeat=2), MixtureMember(replace(cfg.data, split="train[:1]"))),
        max_length=cfg.data.max_length,
    )
    rows = build.build_dataloader(mix, Tokenizer.open(Path(cfg.model)), 3, 3, DistributedContext(0, "cpu"))
    plain = to_plain_config(replace(cfg, data=mix), "sft")
    lines = model_card.data(SimpleNamespace(config=plain, rows={"data": rows})).splitlines()
    name = Path(cfg.data.source).name
    assert [line.split(" | ")[1:3] for line in lines[2:4]] == [[f"`{name}`", "train"], [f"`{name}`", "train[:1]"]]
    assert lines[2].split(" | ")[3] == str(2 * len(rows.parts[0]))


def test_what_evaluate_finds_comes_into_it(copy: Path, tmp_path: Path) -> None:
    found = [{"model": "base", "loss": 2.0, "perplexity": 7.389, "correct": 0, "answers": ["no"]},
             {"model": str(copy), "loss": 1.0, "perplexity": 2.718, "correct": 3, "answers": ["yes"]}]  # fmt: skip
    before = text(copy / "final")
    for _ in range(2):
        model_card.add_evaluation(copy, "held.jsonl (test)", found, 4)
        assert cells(copy / "final", "on held.jsonl (test)") == ["loss", "perplexity", "exact_match"]
        assert cells(copy / "final", "base") == ["2.0000", "7.389", "0.0% (0 of 4)"]
        assert cells(copy / "final", "my-run") == ["1.0000", "2.718", "75.0% (3 of 4)"]
    assert "yes" not in (copy / "evaluation.json").read_text()
    (copy / "evaluation.json").unlink()
    model_card.refresh(copy)
    assert text(copy / "final") == before
    (copy / "final/README.md").write_text("my own words")
    model_card.add_evaluation(copy, "held.jsonl", found, 4)
    assert text(copy / "final") == "my own words"
    model_card.add_evaluation(tmp_path, "held.jsonl", found, 4)
    assert not (tmp_path / "evaluation.json").exists(), "that is no run"


def test_what_was_pushed_by_force_says_so(copy: Path) -> None:
    final = copy / "final"
    verify.VerificationResult("model and files", math.nan, 0.4, 0.4, 0.5, 99, 1e-4, False).write(final)
    meant = front(final)
    for _ in range(2):
        model_card.add_unverified_warning(final)
        assert text(final).count(model_card.WARNING) == 1
    assert text(final).index(model_card.WARNING) < text(final).index("# my-run")
    assert text(final).count("failed the comparison") == 2, "at the top, and where the comparison is told"
    assert front(final) == meant
    before = text(final)
    assert before[before.index("## Repeat") :] and "This check" not in before
    (final / verify.FILE).unlink()
    (final / "README.md").unlink()
    model_card.add_unverified_warning(final)
    assert "nobody has compared" in text(final)
    assert front(final)["library_name"] == "peft"


def test_a_model_that_no_run_has_described(copy: Path) -> None:
    source = HFCheckpoint.open(Path(config(copy.parent).model))
    folder = shutil.copytree(source.path, copy.parent / "merged")
    verify.VerificationResult("base and files", 0.4, 0.1, 0.0, 0.99, 99, 1e-4, True).write(folder)
    model_card.write_minimal_card(folder, source)
    told = front(folder)
    assert (told["base_model"], told["base_model_relation"], told["license"]) == ("acme/tiny", "merge", "apache-2.0")
    assert cells(folder, "largest difference") == ["0.4"]
    assert len(snippet(folder, {"merged": folder})["answer"]) > 0


def test_the_head_is_plain_yaml(run: Path) -> None:
    head = re.match(r"---\n(.*?)\n---\n", text(run / "final"), re.S)
    assert head is not None
    assert yaml.safe_load(head[1]) == front(run / "final")
