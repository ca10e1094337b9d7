"""What people get wrong: one clear line, exit code 2, and nothing half-written."""

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

RUN = ("run", "sft", "sft.yaml")
SAID = [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "It is 2"}]
DOWN = "model.layers.1.mlp.down_proj.weight"


def refused(work, *words, says=()):
    """Run a command that must fail in one line which says all of this."""
    done = work.tune(*words)
    assert done.code == 2, done
    told = done.err.splitlines()
    while told[0].startswith(("step ", "data: ")):  # what went well before
        del told[0]
    assert len(told) == 1, done.err
    assert told[0].startswith("error: ")
    for part in says:
        assert part.lower() in told[0].lower()
    left = {path.name for path in work.folder.glob("out/*")} - {".lock", "config.yaml"}
    assert not left, "something half-written"
    return told[0]


CONFIGS = {
    "misspelt": (("global_bacth_size=4",), ("global_bacth_size", "did you mean", "global_batch_size")),
    "misspelt below": (("optimizer.lrr=1",), ("optimizer.lrr", "lr")),
    "misspelt in a flow": (("data={kind: chat, source: rows.jsonl, lenght: 8}",), ("data.lenght", "max_length")),
    "wrong type": (("global_batch_size=many",), ("global_batch_size", "many")),
    "wrong type below": (("optimizer.lr=fast",), ("optimizer.lr", "fast")),
    "out of range": (("global_batch_size=0",), ("global_batch_size", "1 or more")),
    "unknown kind": (("adapter=lorra",), ("adapter", "lorra", "lora")),
    "no value": (("output_dir=null",), ("output_dir",)),
    "no override": (("global_batch_size",), ("global_batch_size", "key=value")),
    "patience without validation": (
        ("eval_data=null", "early_stopping_patience=1"),
        ("early_stopping_patience", "eval_data"),
    ),
    "missing model": (("model=./nowhere",), ("./nowhere",)),
    "missing rows": (("data.source=nowhere.jsonl",), ("nowhere.jsonl",)),
    "missing template": (("data.chat_template=nowhere.jinja",), ("nowhere.jinja",)),
    "missing split": (("data.split=test",), ("rows.jsonl", "test")),
    "a profile that never begins": (
        ("max_steps=6", "profiler.skip_first=6"),
        ("profiler.skip_first", "`max_steps` is 6"),
    ),
    "a usual profile that never begins": (
        ("max_steps=3", "profiler=true"),
        ("profiler.skip_first", "`max_steps` is 3"),
    ),
    "no such layer": (
        ("adapter={kind: lora, target_modules: q_porj}",),
        ("adapter.target_modules", "q_porj", "q_proj"),
    ),
    "more GPUs than there are": (("--nproc-per-node", "64"), ("--nproc-per-node 64",)),
    "unknown word": (("--epochs", "3"), ("--epochs",)),
}


@pytest.mark.parametrize("words, says", CONFIGS.values(), ids=CONFIGS)
def test_config(work, words, says):
    refused(work, *RUN, *words, says=says)
    assert not (work.folder / "out").exists()


def test_missing_files_of_configs(work):
    refused(work, "run", "sft", "nowhere.yaml", says=("nowhere",))
    refused(work, "run", "sfft", "sft.yaml", says=("sfft", "did you mean 'sft'"))
    refused(work, "validate", "nowhere.yaml", says=("nowhere",))
    refused(work, "run", "generate", "sft.yaml", says=("sft.yaml", "written for the recipe 'sft'"))
    (work.folder / "bad.yaml").write_text("recipe: sft\nmodel: [\n")
    assert re.search(r"bad\.yaml:\d", refused(work, "run", "sft", "bad.yaml"))


def test_several_mistakes_are_told_at_once(work):
    done = work.tune(*RUN, "bacth=4", "optimizer.lr=fast")
    assert done.code == 2
    assert "bacth" in done.err
    assert "optimizer.lr" in done.err


def test_numbers_out_of_range_are_told_at_once(work):
    low = {"global_batch_size": -1, "micro_batch_size": 0, "epochs": 0, "max_steps": 0, "save_every": -2}
    done = work.tune("validate", "sft.yaml", *(f"{name}={value}" for name, value in low.items()), "max_grad_norm=-1")
    assert done.code == 2
    told = [f"command line: {name}: must be 1 or more, not {value}" for name, value in low.items()]
    told.append("command line: max_grad_norm: must not be below 0, not -1.0")
    assert done.err.removeprefix("error: ").splitlines() == told


def row(*messages):
    return json.dumps({"messages": messages})


ROWS = {
    "malformed": ('{"messages": [', ("rows.jsonl:2", "JSON")),
    "no object": ("[1, 2]", ("rows.jsonl:2",)),
    "no messages": ('{"text": "hello"}', ("rows.jsonl:2", "messages")),
    "messages are text": ('{"messages": "hello"}', ("rows.jsonl:2", "messages")),
    "no message": ('{"messages": []}', ("rows.jsonl:2", "messages")),
    "unknown role": (row({"role": "robot", "content": "x"}), ("rows.jsonl:2", "robot")),
    "content is a number": (row({"role": "user", "content": 3}), ("rows.jsonl:2", "content")),
    "no answer": (row(SAID[0]), ("rows.jsonl:2", "nothing to learn")),
    "no UTF-8": (b'{"messages": "\xff"}', ("rows.jsonl:2", "UTF-8")),
    "answer beyond the length": (row({"role": "user", "content": "w " * 99}, SAID[1]), ("rows.jsonl:2", "length")),
}


@pytest.mark.parametrize("line, says", ROWS.values(), ids=ROWS)
def test_row(work, line, says):
    bad = line if isinstance(line, bytes) else line.encode()
    (work.folder / "rows.jsonl").write_bytes(row(*SAID).encode() + b"\n" + bad + b"\n")
    refused(work, *RUN, says=says)


@pytest.mark.parametrize("text", ["", "\n\n"], ids=["empty", "blank"])
def test_no_rows(work, text):
    (work.folder / "rows.jsonl").write_text(text)
    refused(work, *RUN, says=("rows.jsonl", "no row"))


TEMPLATES = {
    "raises": ("{{ raise_exception('roles must alternate') }}", ("roles must alternate",)),
    "no Jinja": ("{% for message in messages %}", ("Jinja",)),
    "escapes": ("{{ messages.__class__.__mro__ }}", ("sandbox",)),
    "escapes by a filter": ("{{ ''|attr('__class__') }}", ("sandbox",)),
    "reads files": ("{% include '/etc/passwd' %}", ("template",)),
    "divides by zero": ("{{ 1 / 0 }}", ("fails",)),
}


@pytest.mark.parametrize("template, says", TEMPLATES.values(), ids=TEMPLATES)
def test_template(work, template, says):
    (work.folder / "my.jinja").write_text(template)
    refused(work, *RUN, "data.chat_template=my.jinja", says=("my.jinja", *says))


def config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def weights(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Put tensors in, or take out those that are None; `__` stands for a dot."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)

    return change


def cut(share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        os.truncate(file, int(file.stat().st_size * share))

    return change


NORM = "model__layers__0__input_layernorm__weight"
CHECKPOINTS = {
    "no config.json": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "malformed config.json": (lambda folder: (folder / "config.json").write_text("{"), ("config.json", "JSON")),
    "unknown model_type": (config(model_type="llamma"), ("config.json", "llamma")),
    "no model_type": (config(model_type=None), ("config.json", "model_type")),
    "other sizes": (config(intermediate_size=52), ("model.safetensors", "mlp", "[32, 48]", "[32, 52]")),
    "fewer layers": (config(num_hidden_layers=1), ("model.safetensors", "model.layers.1.")),
    "more layers": (config(num_hidden_layers=3), ("model.layers.2.", "missing")),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "malformed tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), ("tokenizer.json",)),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("safetensors",)),
    "cut off": (cut(0.5), ("model.safetensors", "damaged or cut off")),
    "cut off in the header": (cut(0.001), ("model.safetensors", "damaged or cut off")),
    "empty": (cut(0), ("model.safetensors", "damaged or cut off")),
    "corrupt": (lambda folder: (folder / "model.safetensors").write_bytes(os.urandom(4096)), ("model.safetensors",)),
    "missing tensor": (weights(**{NORM: None}), ("model.layers.0.input_layernorm.weight", "missing")),
    "surplus tensor": (weights(model__extra__weight=torch.ones(3)), ("model.safetensors", "model.extra.weight")),
    "wrong shape": (weights(**{NORM: torch.ones(7)}), ("model.layers.0.input_layernorm.weight", "[7]", "[32]")),
    "whole numbers": (weights(**{NORM: torch.ones(32, dtype=torch.int32)}), ("input_layernorm", "int32")),
}


@pytest.mark.parametrize("change, says", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoint(work, change, says):
    shutil.copytree(work.model, "model")
    change(work.folder / "model")
    refused(work, *RUN, "model=./model", says=("model", *says))


def test_adapter_of_another_model(work, make):
    assert work.tune(*RUN, "adapter={kind: lora, rank: 4}", "output_dir=first").code == 0
    lora = "adapter={kind: lora, rank: 4, adapter_path: first/final}"
    refused(work, *RUN, lora.replace("first", "nowhere"), says=("nowhere/final",))
    wider = make(work.folder / "wider", hidden_size=40)
    refused(work, *RUN, lora, f"model={wider}", says=("adapter_model.safetensors", "[32, 4]", "[40, 4]"))
    deeper = make(work.folder / "deeper", num_hidden_layers=3)
    refused(work, *RUN, lora, f"model={deeper}", "output_dir=second", says=("layers.2.",))
    refused(work, *RUN, lora.replace("rank: 4", "rank: 8"), "output_dir=third", says=("adapter.rank", "8", "4"))
    os.truncate("first/final/adapter_model.safetensors", 100)
    refused(work, *RUN, lora, "output_dir=fourth", says=("adapter_model.safetensors", "damaged"))


def test_folder_of_something_else(work):
    (work.folder / "thesis").mkdir()
    (work.folder / "thesis/chapter.tex").write_text("x")
    for fresh in ((), ("--overwrite",)):
        refused(work, *RUN, "output_dir=thesis", *fresh, says=("thesis", "not the folder of a run"))
        assert [path.name for path in (work.folder / "thesis").iterdir()] == ["chapter.tex"]
    refused(work, *RUN, "output_dir=rows.jsonl", says=("rows.jsonl",))


@pytest.fixture
def limit():
    """Bound the size of files, as a disk that is full does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size or soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "adapter, size", [("none", 150_000), ("{kind: lora, rank: 64}", 300_000)], ids=["full", "lora"]
)
def test_a_write_that_the_disk_refuses(work, limit, adapter, size):
    """The state, with its moments, is refused; with room again, the end is that of an unbroken run."""
    words = (*RUN, f"adapter={adapter}")
    assert work.tune(*words, "output_dir=unbroken").code == 0
    biggest = max(path.stat().st_size for path in work.folder.glob("unbroken/state/*/*"))
    assert biggest > size
    limit(size)
    refused(work, *words, "output_dir=small", says=("cannot write small", "nothing old was touched"))
    limit(None)
    assert not list(work.folder.glob("small/**/*.partial"))
    assert work.tune(*words, "output_dir=small").code == 0
    assert work.same("small", "unbroken")


@pytest.fixture
def disk(work):
    """A small disk of its own; its size can be changed."""
    place = work.folder / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)
    subprocess.run(["umount", "--lazy", place], check=True)


def test_full_disk(work, disk):
    """The state before the disk was full is intact, and with room again the run goes on from it."""
    assert work.tune(*RUN, "output_dir=unbroken").code == 0
    state = sum(path.stat().st_size for path in work.folder.glob("unbroken/state/*/*"))
    disk(f"size={int(2.5 * state) // 4096 * 4}k")
    told = refused(
        work, *RUN, "output_dir=disk/run", "save_total_limit=9", says=("cannot write disk/run/state", "make room")
    )
    step = int(re.search(r"last complete state is disk/run/state/(\d+)", told)[1])
    assert step >= 1
    assert not list(work.folder.glob("disk/run/**/*.partial"))
    disk("size=9m")
    assert work.tune(*RUN, "output_dir=disk/run", "save_total_limit=9").code == 0
    assert work.same("disk/run", "unbroken")


def test_read_only_disk(work, disk):
    disk("ro")
    refused(work, *RUN, "output_dir=disk/run", says=("disk/run", "read-only"))


def test_evaluate_and_generate(work):
    data = "{kind: chat, source: rows.jsonl, max_length: 64}"
    Path("ask.yaml").write_text(f"recipe: evaluate\nmodel: {work.model}\ndata: {data}\ndevice: cpu\n")
    Path("say.yaml").write_text(f"recipe: generate\nmodel: {work.model}\nsource: bad.jsonl\ndevice: cpu\n")
    refused(work, "run", "evaluate", "ask.yaml", "model=./nowhere", says=("./nowhere",))
    refused(work, "run", "evaluate", "ask.yaml", "--overwrite", says=("--overwrite",))
    refused(work, "run", "generate", "say.yaml", says=("bad.jsonl",))
    for line, says in [('{"text": 1}', "bad.jsonl:1"), ("{", "bad.jsonl:1"), ('{"messages": [3]}', "bad.jsonl:1")]:
        Path("bad.jsonl").write_text(line + "\n")
        refused(work, "run", "generate", "say.yaml", "output_path=answers.jsonl", says=(says,))
        assert not Path("answers.jsonl").exists()
    refused(work, "run", "generate", "say.yaml", "source=null", says=("prompts",))
    Path("run/state").mkdir(parents=True)
    refused(work, "run", "generate", "say.yaml", "source=null", "prompts=[x]", "model=./run", says=("run", "not ended"))


def test_a_config_left_behind_is_still_a_config(work):
    """What a refused run leaves is its config at most, and any other config may follow."""
    refused(work, *RUN, "data.source=held.jsonl", "data.max_length=2", says=("held.jsonl:1",))
    assert yaml.safe_load(Path("out/config.yaml").read_text())["data"]["max_length"] == 2
    assert work.tune(*RUN).code == 0
