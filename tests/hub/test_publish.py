"""Runs that send what they learn to the Hub while they go on."""

import json
import shlex
import subprocess
import sys
from threading import Event

import pytest
import torch
from safetensors.torch import load

from tests.hub.conftest import READER, TOKEN, Place
from tests.hub.repos import card_problems
from tests.hub.wire import Fault
from tests.outcome import Outcome
from tests.waiting import until
from tunekit import assets
from tunekit.publishing.publish import list_files

NANO = assets.MODELS["tunekit/nano"]
WORDS = [
    "run",
    "sft",
    "nano/tools_lora",
    "max_steps=6",
    "global_batch_size=2",
    "micro_batch_size=2",
    "save_every=6",
    "eval_data=null",
]
WORDS += ["output_dir=run", "device=cpu", "adapter.rank=2", "push_to_hub.repo_id=ann/tools"]
ADAPTER = "adapter_model.safetensors"


def train(place: Place, *words: str, **env: str) -> Outcome:
    return place.tune(*WORDS, *words, **env)


def result(place: Place) -> dict[str, bytes]:
    """What others are to get of the run."""
    return {path: file.read_bytes() for path, file in list_files(place.folder / "run/final").items()}


def test_checkpoints_on_the_way_and_the_result(place: Place) -> None:
    done = train(place, "push_to_hub.push_every=3")
    assert done.code == 0, done.err
    repo = place.hub.repos["ann/tools"]
    assert repo.private and repo.files == result(place)
    assert {"README.md", "curves.png", "verification.json", "adapter_config.json", ADAPTER} < set(repo.files)
    assert [commit.title for commit in repo.history("main")][1:] == ["Step 3", "initial commit"]
    assert b"This is step 3 of 6 of a run that goes on." in repo.history("main")[1].files["README.md"].data
    final, step = (load(commit.files[ADAPTER].data) for commit in repo.history("main")[:2])
    assert final.keys() == step.keys() and not any(torch.equal(final[name], step[name]) for name in final)
    assert not (place.folder / "run/upload").exists()
    assert not place.search(TOKEN)


@pytest.mark.slow
def test_peft_opens_it_by_its_name(place: Place) -> None:
    """With its base, which lies on the same Hub, at the revision that the config names; so do we."""
    repo = place.hub.put("ann/base", {file.name: file.read_bytes() for file in NANO.iterdir()})
    repo.tags["v1"] = repo.refs["main"]
    place.hub.put("ann/base", {"config.json": b"of another model"})
    assert train(place, "model=ann/base@v1").code == 0
    assert json.loads(place.hub.repos["ann/tools"].files["adapter_config.json"])["revision"] == "v1"
    assert repo.tags["v1"][:7] in place.hub.repos["ann/tools"].files["README.md"].decode()
    assert place.tune("chat", "ann/tools", text="Hello\n").out
    code = """
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens = AutoTokenizer.from_pretrained("ann/tools")("Weather in Oslo?", return_tensors="pt")
base = AutoModelForCausalLM.from_pretrained("ann/base", revision="v1")
plain = base(**tokens).logits
wanted = PeftModel.from_pretrained(base, "run/final")(**tokens).logits
found = AutoPeftModelForCausalLM.from_pretrained("ann/tools")(**tokens).logits
assert torch.equal(wanted, found) and not torch.allclose(plain, found, atol=0.1)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=place.env(), capture_output=True, text=True, cwd=place.folder
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_sent(place: Place) -> None:
    sent = Event()
    place.hub.faults = [Fault("PUT", "/storage/", cut="lost", hold=sent)]
    place.start(*WORDS, "push_to_hub.push_every=2")
    until((place.folder / "run/final/complete").exists)
    assert not sent.is_set()
    assert not place.hub.repos["ann/tools"].files, "a part is visible"
    sent.set()
    done = place.end()
    assert done.code == 0 and "step 4 is not sent: an earlier one" in done.err, done.err
    titles = [commit.title for commit in place.hub.repos["ann/tools"].history("main")]
    assert titles[1:] == ["Step 2", "initial commit"] and place.hub.repos["ann/tools"].files == result(place)


@pytest.mark.slow
def test_a_checkpoint_that_is_not_taken_does_no_harm(place: Place) -> None:
    place.hub.faults = [Fault("POST", "/commit/", 403)]
    done = train(place, "push_to_hub.push_every=4")
    assert done.code == 0 and "Step 4 was not sent: " in done.err, done.err
    assert place.hub.repos["ann/tools"].files == result(place)
    assert not (place.folder / "run/upload").exists()


@pytest.mark.slow
def test_a_result_that_is_not_taken_can_be_sent_later(place: Place) -> None:
    place.hub.faults = [Fault("POST", "/commit/", 403, times=2)]
    error = train(place, "push_to_hub.revision=new").error
    assert "the result stays in run/final" in error
    words = shlex.split(error.partition("to send it: ")[2])
    assert words == ["tune", "push", "run", "ann/tools", "--private", "--revision", "new"]
    again = train(place, "push_to_hub.revision=new")  # the run is over, and nothing is trained again
    assert "refuses to write ann/tools" in again.error and "nothing is left to do" in again.err
    assert place.tune(*words[1:]).code == 0
    repo = place.hub.repos["ann/tools"]
    assert {path: blob.data for path, blob in repo.find("new").files.items() if path[0] != "."} == result(place)
    assert train(place, "push_to_hub.revision=new").code == 0 and len(repo.history("new")) == 2


def test_who_may_not_send_is_told_before_training(place: Place) -> None:
    for env, says in (({"HF_TOKEN": "hf_wrongTokenOfNobody"}, "refused this token"), ({"HF_TOKEN": READER}, "refuses")):
        assert says in train(place, **env).error
    repo = place.hub.put("ann/tools", {})
    assert "there already and public" in train(place).error
    repo.private = True
    assert "you don't have write permission" in train(place, HF_TOKEN=READER).error
    assert not place.hub.seen("POST", "/commit/")
    assert not (place.folder / "run/metrics.jsonl").exists()
    assert not place.search("hf_wrongTokenOfNobody") and not place.search(READER)


@pytest.mark.slow
def test_the_whole_model_in_place_of_the_adapter(place: Place) -> None:
    done = train(place, "push_to_hub.merge_adapter=true", "push_to_hub.push_every=4")
    assert done.code == 0, done.err
    repo = place.hub.repos["ann/tools"]
    step, final = (load(commit.files["model.safetensors"].data) for commit in repo.history("main")[1::-1])
    assert "adapter_config.json" not in repo.files and step.keys() == final.keys()
    assert json.loads(repo.files["verification.json"])["passed"] is True
    card = repo.files["README.md"].decode()
    assert card_problems(card) == ([], []) and "library_name: transformers" in card
    assert all(title in card for title in ("## Training", "## Data", "## Repeat")) and "push" not in card
    assert "curves.png" in repo.files
    assert place.tune("chat", "ann/tools", text="Weather in Oslo?\n").out
    assert {path.name for path in (place.folder / "run").iterdir()} == {
        "config.yaml", "metrics.jsonl", "state", "final", ".lock"}  # fmt: skip
