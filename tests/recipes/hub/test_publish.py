"""Runs that upload checkpoints and the result to the Hub."""

import json
import shlex
from threading import Event

import pytest
import torch
from safetensors.torch import load

from tests.helpers.command_result import CommandResult
from tests.helpers.hub.http_handler import Fault
from tests.helpers.hub.repositories import card_problems
from tests.helpers.wait import wait_until
from tests.recipes.hub.conftest import READ_TOKEN, TOKEN, Sandbox
from tunekit import assets
from tunekit.publishing.publish import list_files

NANO = assets.MODELS["tunekit/nano"]
ARGS = [
    "run",
    "sft",
    "nano/tools_lora",
    "max_steps=6",
    "global_batch_size=2",
    "micro_batch_size=2",
    "save_every=6",
    "eval_data=null",
]
ARGS += ["output_dir=run", "device=cpu", "adapter.rank=2", "data.max_samples=24", "push_to_hub.repo_id=ann/tools"]
ADAPTER = "adapter_model.safetensors"


def train(sandbox: Sandbox, *words: str, **env: str) -> CommandResult:
    return sandbox.tune(*ARGS, *words, **env)


def result_files(sandbox: Sandbox) -> dict[str, bytes]:
    """Files of the run that are uploaded."""
    return {path: file.read_bytes() for path, file in list_files(sandbox.directory / "run/final").items()}


def test_checkpoints_and_result_are_uploaded(sandbox: Sandbox) -> None:
    done = train(sandbox, "push_to_hub.push_every=3")
    assert done.code == 0, done.err
    repo = sandbox.hub.repos["ann/tools"]
    assert repo.private and repo.files == result_files(sandbox)
    assert {"README.md", "curves.png", "verification.json", "adapter_config.json", ADAPTER} < set(repo.files)
    assert [commit.title for commit in repo.history("main")][1:] == ["Step 3", "initial commit"]
    assert b"step 3 of 6" in repo.history("main")[1].files["README.md"].data
    final, step = (load(commit.files[ADAPTER].data) for commit in repo.history("main")[:2])
    assert final.keys() == step.keys() and not any(torch.equal(final[name], step[name]) for name in final)
    assert not (sandbox.directory / "run/upload").exists()
    assert not sandbox.search(TOKEN)


@pytest.mark.slow
def test_peft_opens_uploaded_adapter(sandbox: Sandbox) -> None:
    """Its base is on the same Hub, at the revision of the config. tunekit opens it too."""
    repo = sandbox.hub.put("ann/base", {file.name: file.read_bytes() for file in NANO.iterdir()})
    repo.tags["v1"] = repo.refs["main"]
    sandbox.hub.put("ann/base", {"config.json": b"another model"})
    assert train(sandbox, "model=ann/base@v1").code == 0
    assert json.loads(sandbox.hub.repos["ann/tools"].files["adapter_config.json"])["revision"] == "v1"
    assert repo.tags["v1"][:7] in sandbox.hub.repos["ann/tools"].files["README.md"].decode()
    assert sandbox.tune("chat", "ann/tools", text="Hello\n").out
    code = """
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens = AutoTokenizer.from_pretrained("ann/tools")("Weather in Oslo?", return_tensors="pt")
base = AutoModelForCausalLM.from_pretrained("ann/base", revision="v1")
plain = base(**tokens).logits
expected = PeftModel.from_pretrained(base, "run/final")(**tokens).logits
actual = AutoPeftModelForCausalLM.from_pretrained("ann/tools")(**tokens).logits
assert torch.equal(expected, actual) and not torch.allclose(plain, actual, atol=0.1)
"""
    done = sandbox.run_python(code)
    assert done.code == 0, done.err


@pytest.mark.slow
def test_training_continues_during_an_upload(sandbox: Sandbox) -> None:
    is_sent = Event()
    sandbox.hub.faults = [Fault("PUT", "/storage/", cut="lost", until=is_sent)]
    sandbox.start(*ARGS, "push_to_hub.push_every=2")
    wait_until((sandbox.directory / "run/final/complete").exists)
    assert not is_sent.is_set()
    assert not sandbox.hub.repos["ann/tools"].files, "a partial upload is visible"
    is_sent.set()
    done = sandbox.end()
    assert done.code == 0 and "tep 4 " in done.err, done.err
    titles = [commit.title for commit in sandbox.hub.repos["ann/tools"].history("main")]
    assert titles[1:] == ["Step 2", "initial commit"] and sandbox.hub.repos["ann/tools"].files == result_files(sandbox)


@pytest.mark.slow
def test_failed_checkpoint_upload_does_not_stop_training(sandbox: Sandbox) -> None:
    sandbox.hub.faults = [Fault("POST", "/commit/", 403)]
    done = train(sandbox, "push_to_hub.push_every=4")
    assert done.code == 0 and "tep 4 " in done.err, done.err
    assert sandbox.hub.repos["ann/tools"].files == result_files(sandbox)
    assert not (sandbox.directory / "run/upload").exists()


@pytest.mark.slow
def test_failed_result_upload_can_be_repeated(sandbox: Sandbox) -> None:
    sandbox.hub.faults = [Fault("POST", "/commit/", 403, times=2)]
    error = train(sandbox, "push_to_hub.revision=new").error
    assert "run/final" in error
    command = shlex.split(error[error.index("tune push") :])
    assert command == ["tune", "push", "run", "ann/tools", "--private", "--revision", "new"]
    repeated = train(sandbox, "push_to_hub.revision=new")  # the run is complete, so nothing is trained again
    assert "ann/tools" in repeated.error
    assert sandbox.tune(*command[1:]).code == 0
    repo = sandbox.hub.repos["ann/tools"]
    assert {path: blob.data for path, blob in repo.find("new").files.items() if path[0] != "."} == result_files(sandbox)
    assert train(sandbox, "push_to_hub.revision=new").code == 0 and len(repo.history("new")) == 2


def test_missing_write_access_is_an_error_before_training(sandbox: Sandbox) -> None:
    for token, part in (("hf_wrongTokenOfMallory", "token"), (READ_TOKEN, "ann")):
        assert part in train(sandbox, HF_TOKEN=token).error
    repo = sandbox.hub.put("ann/tools", {})
    assert "public" in train(sandbox).error
    repo.private = True
    assert "you don't have write permission" in train(sandbox, HF_TOKEN=READ_TOKEN).error
    assert not sandbox.hub.seen("POST", "/commit/")
    assert not (sandbox.directory / "run/metrics.jsonl").exists()
    assert not sandbox.search("hf_wrongTokenOfMallory") and not sandbox.search(READ_TOKEN)


@pytest.mark.slow
def test_merged_model_is_uploaded_instead_of_the_adapter(sandbox: Sandbox) -> None:
    template = "data.chat_template_kwargs.day=Sunday"
    done = train(sandbox, "push_to_hub.merge_adapter=true", "push_to_hub.push_every=4", template)
    assert done.code == 0, done.err
    repo = sandbox.hub.repos["ann/tools"]
    step, final = (load(commit.files["model.safetensors"].data) for commit in repo.history("main")[1::-1])
    assert "adapter_config.json" not in repo.files and step.keys() == final.keys()
    texts = [commit.files["chat_template.jinja"].data for commit in repo.history("main")[:2]]
    assert all(text.startswith(b"{%- if day is not defined %}") for text in texts), "the template of the run"
    assert json.loads(repo.files["verification.json"])["passed"] is True
    card = repo.files["README.md"].decode()
    assert card_problems(card) == ([], []) and "library_name: transformers" in card
    assert all(title in card for title in ("## Training", "## Data", "## Repeat")) and "push" not in card
    assert "curves.png" in repo.files
    assert sandbox.tune("chat", "ann/tools", text="Weather in Oslo?\n").out
    assert {path.name for path in (sandbox.directory / "run").iterdir()} == {
        "config.yaml", "metrics.jsonl", "run_info.json", "report.html", "state", "final", ".lock"}  # fmt: skip
