"""User errors: one clear line, exit code 2, and no partial output."""

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
CONVERSATION = [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "It is 2"}]
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


def expect_error(workspace, *args, texts=()):
    """Run a command that must fail with a one-line error that contains all `texts`."""
    result = workspace.run_tune(*args)
    assert result.code == 2, result
    lines = result.err.splitlines()
    while lines[0].startswith(("step ", "data: ")):  # progress before the error
        del lines[0]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    for text in texts:
        assert text.lower() in lines[0].lower()
    leftovers = {path.name for path in workspace.folder.glob("out/*")} - {".lock", "config.yaml"}
    assert not leftovers, "partial output"
    return lines[0]


CONFIGS = {
    "misspelled": (("global_bacth_size=4",), ("global_bacth_size", "'global_batch_size'?")),
    "misspelled below": (("optimizer.lrr=1",), ("optimizer.lrr", "lr")),
    "misspelled in a flow": (("data={kind: chat, source: rows.jsonl, lenght: 8}",), ("data.lenght", "max_length")),
    "wrong type": (("global_batch_size=many",), ("global_batch_size", "many")),
    "wrong type below": (("optimizer.lr=fast",), ("optimizer.lr", "fast")),
    "out of range": (("global_batch_size=0",), ("global_batch_size", ">= 1")),
    "unknown kind": (("adapter=lorra",), ("adapter", "lorra", "lora")),
    "no value": (("output_dir=null",), ("output_dir",)),
    "no override": (("global_batch_size",), ("global_batch_size", "key=value")),
    "patience without validation": (
        ("eval_data=null", "early_stopping_patience=1"),
        ("early_stopping_patience", "eval_data"),
    ),
    "missing model": (("model=./nowhere",), ("./nowhere",)),
    "GGUF file": (("model=./x.gguf",), ("x.gguf", "safetensors")),
    "file with a split": (("data.source=rows.jsonl:train",), ("rows.jsonl:train", "source: rows.jsonl")),
    "missing rows": (("data.source=nowhere.jsonl",), ("nowhere.jsonl",)),
    "missing template": (("data.chat_template=nowhere.jinja",), ("nowhere.jinja",)),
    "missing split": (("data.split=test",), ("rows.jsonl", "test")),
    "a profile that never begins": (
        ("max_steps=6", "profiler.skip_first=6"),
        ("profiler.skip_first", "max_steps=6"),
    ),
    "a usual profile that never begins": (
        ("max_steps=3", "profiler=true"),
        ("profiler.skip_first", "max_steps=3"),
    ),
    "no such layer": (
        ("adapter={kind: lora, target_modules: q_porj}",),
        ("adapter.target_modules", "q_porj", "q_proj"),
    ),
    "more GPUs than there are": (("--nproc-per-node", "64"), ("--nproc-per-node 64",)),
    "unknown word": (("--epochs", "3"), ("--epochs",)),
}


@pytest.mark.parametrize("args, texts", CONFIGS.values(), ids=CONFIGS)
def test_config_error_names_the_key(workspace, args, texts):
    expect_error(workspace, *RUN, *args, texts=texts)
    assert not (workspace.folder / "out").exists()


def test_missing_model_and_missing_rows_are_reported_together(workspace):
    result = workspace.run_tune(
        "validate", "sft.yaml", "model=./nowhere", "data.source=a.jsonl", "eval_data.source=b.jsonl"
    )
    assert result.code == 2
    lines = result.err.splitlines()
    assert (
        len(lines) == 3 and lines[0].startswith("error: ./nowhere") and "a.jsonl" in lines[1] and "b.jsonl" in lines[2]
    )


def test_max_length_beyond_the_context_is_a_warning(workspace):
    assert "warning" not in workspace.run_tune("validate", "sft.yaml").err
    result = workspace.run_tune("validate", "sft.yaml", "data.max_length=99999")
    assert result.code == 0 and result.err.startswith("warning: data.max_length: 99,999 exceeds")


def test_missing_config_is_an_error(workspace):
    expect_error(workspace, "run", "sft", "nowhere.yaml", texts=("nowhere",))
    expect_error(workspace, "run", "sfft", "sft.yaml", texts=("sfft", "'sft'?"))
    expect_error(workspace, "validate", "nowhere.yaml", texts=("nowhere",))
    expect_error(workspace, "run", "generate", "sft.yaml", texts=("sft.yaml", "written for the recipe 'sft'"))
    (workspace.folder / "bad.yaml").write_text("recipe: sft\nmodel: [\n")
    assert re.search(r"bad\.yaml:\d", expect_error(workspace, "run", "sft", "bad.yaml"))


def test_config_errors_are_reported_together(workspace):
    result = workspace.run_tune(*RUN, "bacth=4", "optimizer.lr=fast")
    assert result.code == 2
    assert "bacth" in result.err
    assert "optimizer.lr" in result.err


def test_out_of_range_values_are_reported_together(workspace):
    values = {"global_batch_size": -1, "micro_batch_size": 0, "epochs": 0, "max_steps": 0, "save_every": -2}
    result = workspace.run_tune(
        "validate", "sft.yaml", *(f"{name}={value}" for name, value in values.items()), "max_grad_norm=-1"
    )
    assert result.code == 2
    keys = [f"command line: {name}: " for name, value in values.items()]
    keys.append("command line: max_grad_norm: ")
    lines = result.err.removeprefix("error: ").splitlines()
    assert len(lines) == len(keys)
    assert all(line.startswith(key) for line, key in zip(lines, keys, strict=True))


def make_row(*messages):
    return json.dumps({"messages": messages})


ROWS = {
    "malformed": ('{"messages": [', ("rows.jsonl:2", "JSON")),
    "no object": ("[1, 2]", ("rows.jsonl:2",)),
    "no messages": ('{"text": "hello"}', ("rows.jsonl:2", "messages")),
    "messages are text": ('{"messages": "hello"}', ("rows.jsonl:2", "messages")),
    "no message": ('{"messages": []}', ("rows.jsonl:2", "messages")),
    "unknown role": (make_row({"role": "robot", "content": "x"}), ("rows.jsonl:2", "robot")),
    "content is a number": (make_row({"role": "user", "content": 3}), ("rows.jsonl:2", "content")),
    "no answer": (make_row(CONVERSATION[0]), ("rows.jsonl:2", "no target tokens")),
    "no UTF-8": (b'{"messages": "\xff"}', ("rows.jsonl:2", "UTF-8")),
    "answer beyond the length": (
        make_row({"role": "user", "content": "w " * 99}, CONVERSATION[1]),
        ("rows.jsonl:2", "length"),
    ),
}


@pytest.mark.parametrize("line, texts", ROWS.values(), ids=ROWS)
def test_bad_row_error_names_file_and_line(workspace, line, texts):
    bad = line if isinstance(line, bytes) else line.encode()
    (workspace.folder / "rows.jsonl").write_bytes(make_row(*CONVERSATION).encode() + b"\n" + bad + b"\n")
    expect_error(workspace, *RUN, texts=texts)


@pytest.mark.parametrize("text", ["", "\n\n"], ids=["empty", "blank"])
def test_empty_file_is_an_error(workspace, text):
    (workspace.folder / "rows.jsonl").write_text(text)
    expect_error(workspace, *RUN, texts=("rows.jsonl", "no row"))


TEMPLATES = {
    "raises": ("{{ raise_exception('roles must alternate') }}", ("roles must alternate",)),
    "no Jinja": ("{% for message in messages %}", ("Jinja",)),
    "escapes": ("{{ messages.__class__.__mro__ }}", ("sandbox",)),
    "escapes by a filter": ("{{ ''|attr('__class__') }}", ("sandbox",)),
    "reads files": ("{% include '/etc/passwd' %}", ("template",)),
    "divides by zero": ("{{ 1 / 0 }}", ("fails",)),
}


@pytest.mark.parametrize("template, texts", TEMPLATES.values(), ids=TEMPLATES)
def test_template_error_names_the_file(workspace, template, texts):
    (workspace.folder / "my.jinja").write_text(template)
    expect_error(workspace, *RUN, "data.chat_template=my.jinja", texts=("my.jinja", *texts))


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def change_weights(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Add tensors, or remove those that are None; `__` stands for a dot."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)

    return change


def truncate_weights(fraction: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        os.truncate(file, int(file.stat().st_size * fraction))

    return change


NORM_KEY = "model__layers__0__input_layernorm__weight"
CHECKPOINTS = {
    "no config.json": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "malformed config.json": (lambda folder: (folder / "config.json").write_text("{"), ("config.json", "JSON")),
    "unknown model_type": (change_config(model_type="llamma"), ("config.json", "llamma")),
    "no model_type": (change_config(model_type=None), ("config.json", "model_type")),
    "other sizes": (change_config(intermediate_size=52), ("model.safetensors", "mlp", "[32, 48]", "[32, 52]")),
    "fewer layers": (change_config(num_hidden_layers=1), ("model.safetensors", "model.layers.1.")),
    "more layers": (change_config(num_hidden_layers=3), ("model.layers.2.", "missing")),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "malformed tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), ("tokenizer.json",)),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("safetensors",)),
    "cut off": (truncate_weights(0.5), ("model.safetensors", "truncated")),
    "cut off in the header": (truncate_weights(0.001), ("model.safetensors", "truncated")),
    "empty": (truncate_weights(0), ("model.safetensors", "truncated")),
    "corrupt": (lambda folder: (folder / "model.safetensors").write_bytes(os.urandom(4096)), ("model.safetensors",)),
    "missing tensor": (change_weights(**{NORM_KEY: None}), ("model.layers.0.input_layernorm.weight", "missing")),
    "surplus tensor": (change_weights(model__extra__weight=torch.ones(3)), ("model.safetensors", "model.extra.weight")),
    "wrong shape": (
        change_weights(**{NORM_KEY: torch.ones(7)}),
        ("model.layers.0.input_layernorm.weight", "[7]", "[32]"),
    ),
    "integers": (change_weights(**{NORM_KEY: torch.ones(32, dtype=torch.int32)}), ("input_layernorm", "int32")),
}


@pytest.mark.parametrize("change, texts", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_damaged_checkpoint_is_an_error(workspace, change, texts):
    shutil.copytree(workspace.model, "model")
    change(workspace.folder / "model")
    expect_error(workspace, *RUN, "model=./model", texts=("model", *texts))


def test_adapter_of_another_model_is_an_error(workspace, make_model):
    assert workspace.run_tune(*RUN, "adapter={kind: lora, rank: 4}", "output_dir=first").code == 0
    lora = "adapter={kind: lora, rank: 4, adapter_path: first/final}"
    expect_error(workspace, *RUN, lora.replace("first", "nowhere"), texts=("nowhere/final",))
    wider = make_model(workspace.folder / "wider", hidden_size=40)
    expect_error(workspace, *RUN, lora, f"model={wider}", texts=("adapter_model.safetensors", "[32, 4]", "[40, 4]"))
    deeper = make_model(workspace.folder / "deeper", num_hidden_layers=3)
    expect_error(workspace, *RUN, lora, f"model={deeper}", "output_dir=second", texts=("layers.2.",))
    expect_error(
        workspace, *RUN, lora.replace("rank: 4", "rank: 8"), "output_dir=third", texts=("adapter.rank", "8", "4")
    )
    os.truncate("first/final/adapter_model.safetensors", 100)
    expect_error(workspace, *RUN, lora, "output_dir=fourth", texts=("adapter_model.safetensors", "truncated"))


def test_base_of_an_adapter_on_another_machine(workspace):
    """The error names the adapter and its base. Another base can be set in its config, or given to `tune merge`."""
    assert workspace.run_tune(*RUN, "adapter={kind: lora, rank: 4}").code == 0
    file = Path("out/final/adapter_config.json")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": "/home/bob/base"}))
    Path("say.yaml").write_text(
        "recipe: generate\nmodel: ./out\nprompts: [x]\ndevice: cpu\nsampling: {max_new_tokens: 1}\n"
    )
    commands = ("run", "generate", "say.yaml"), ("export", "out", "x.gguf"), ("chat", "out"), ("serve", "out")
    for command in (*commands, ("run", "sft", "sft.yaml", "model=./out", "output_dir=more")):
        result = workspace.run_tune(*command)
        for text in (str(file), "/home/bob/base", "base_model_name_or_path", "tune merge BASE "):
            assert text in result.error
    assert workspace.run_tune("merge", str(workspace.model), "out", "merged").code == 0
    assert workspace.run_tune("run", "generate", "say.yaml", "model=./merged").code == 0
    file.write_text(json.dumps(config | {"base_model_name_or_path": str(workspace.model)}))
    assert workspace.run_tune("run", "generate", "say.yaml").code == 0


def test_unrelated_directory_is_not_overwritten(workspace):
    (workspace.folder / "thesis").mkdir()
    (workspace.folder / "thesis/chapter.tex").write_text("x")
    for flags in ((), ("--overwrite",)):
        expect_error(workspace, *RUN, "output_dir=thesis", *flags, texts=("thesis", "output_dir"))
        assert [path.name for path in (workspace.folder / "thesis").iterdir()] == ["chapter.tex"]
    expect_error(workspace, *RUN, "output_dir=rows.jsonl", texts=("rows.jsonl",))


@pytest.fixture
def file_size_limit():
    """Limit the file size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size or soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "adapter, size", [("none", 150_000), ("{kind: lora, rank: 64}", 300_000)], ids=["full", "lora"]
)
def test_run_resumes_after_a_write_error(workspace, file_size_limit, adapter, size):
    """Writing the state fails. With enough space, the run ends as an uninterrupted one."""
    args = (*RUN, f"adapter={adapter}")
    assert workspace.run_tune(*args, "output_dir=unbroken").code == 0
    largest_file = max(path.stat().st_size for path in workspace.folder.glob("unbroken/state/*/*"))
    assert largest_file > size
    file_size_limit(size)
    expect_error(workspace, *args, "output_dir=small", texts=("small", "write failed"))
    file_size_limit(None)
    assert not list(workspace.folder.glob("small/**/*.partial"))
    assert workspace.run_tune(*args, "output_dir=small").code == 0
    assert workspace.is_same_run("small", "unbroken")


@pytest.fixture
def small_disk(workspace):
    """Small separate file system whose size can be changed."""
    mount_point = workspace.folder / "disk"
    mount_point.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount_point], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", mount_point], check=True)
    subprocess.run(["umount", "--lazy", mount_point], check=True)


def test_run_resumes_after_a_full_disk(workspace, small_disk):
    """The last state is intact. With enough space, the run resumes from it."""
    args = (*RUN, "save_every=1")
    assert workspace.run_tune(*args, "output_dir=unbroken").code == 0
    state = sum(path.stat().st_size for path in workspace.folder.glob("unbroken/state/*/*"))
    small_disk(f"size={int(2.5 * state) // 4096 * 4}k")
    message = expect_error(
        workspace, *args, "output_dir=disk/run", "save_total_limit=9", texts=("disk/run/state", "free")
    )
    step = int(re.search(r"last complete state is disk/run/state/(\d+)", message)[1])
    assert step >= 1
    assert not list(workspace.folder.glob("disk/run/**/*.partial"))
    small_disk("size=9m")
    assert workspace.run_tune(*args, "output_dir=disk/run", "save_total_limit=9").code == 0
    assert workspace.is_same_run("disk/run", "unbroken")


def test_read_only_disk_is_an_error(workspace, small_disk):
    small_disk("ro")
    expect_error(workspace, *RUN, "output_dir=disk/run", texts=("disk/run", "read-only"))


def test_errors_of_evaluate_and_generate(workspace):
    data = "{kind: chat, source: rows.jsonl, max_length: 64}"
    Path("ask.yaml").write_text(f"recipe: evaluate\nmodel: {workspace.model}\ndata: {data}\ndevice: cpu\n")
    Path("say.yaml").write_text(f"recipe: generate\nmodel: {workspace.model}\nsource: bad.jsonl\ndevice: cpu\n")
    expect_error(workspace, "run", "evaluate", "ask.yaml", "model=./nowhere", texts=("./nowhere",))
    expect_error(workspace, "run", "evaluate", "ask.yaml", "--overwrite", texts=("--overwrite",))
    expect_error(workspace, "run", "generate", "say.yaml", texts=("bad.jsonl",))
    for line, texts in [('{"text": 1}', "bad.jsonl:1"), ("{", "bad.jsonl:1"), ('{"messages": [3]}', "bad.jsonl:1")]:
        Path("bad.jsonl").write_text(line + "\n")
        expect_error(workspace, "run", "generate", "say.yaml", "output_path=answers.jsonl", texts=(texts,))
        assert not Path("answers.jsonl").exists()
    expect_error(workspace, "run", "generate", "say.yaml", "source=null", texts=("prompts",))
    Path("run/state").mkdir(parents=True)
    expect_error(
        workspace,
        "run",
        "generate",
        "say.yaml",
        "source=null",
        "prompts=[x]",
        "model=./run",
        texts=("run", "not complete"),
    )


def test_refused_run_leaves_only_its_config(workspace):
    """A refused run leaves at most its config, and a run with another config can follow."""
    expect_error(workspace, *RUN, "data.source=held.jsonl", "data.max_length=2", texts=("held.jsonl:1",))
    assert yaml.safe_load(Path("out/config.yaml").read_text())["data"]["max_length"] == 2
    assert workspace.run_tune(*RUN).code == 0
