"""Runs that add tokens: resumed, merged, continued, planned, and used for answers, like any other."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.recipe_runs import Workspace, stop_after

TOKENS = ("new_tokens={<add>: plus}", "new_special_tokens=[<|im_start|>, <|im_end|>]", "data.chat_template=chatml")
RUN = ("run", "sft", "sft.yaml", "max_steps=4", *TOKENS)
LORA = "adapter={kind: lora, rank: 4}"
PREFERENCE = ("run", "preference", "preference.yaml", "max_steps=1")


def run_ok(workspace: Workspace, *args: str) -> str:
    result = workspace.run_tune(*args)
    assert result.code == 0, result.err
    return result.err


@pytest.mark.parametrize("options", [(LORA, "quantization=nf4"), ("adapter=none",)])
def test_resumed_run_equals_an_uninterrupted_one(
    options: tuple[str, ...], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ok(workspace, *RUN, *options, "output_dir=single")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert workspace.run_tune(*RUN, *options, "save_every=2", "output_dir=parts").code != 0
    run_ok(workspace, *RUN, *options, "save_every=2", "output_dir=parts")
    name = "model.safetensors" if options == ("adapter=none",) else "adapter_model.safetensors"
    single, parts = (load_file(workspace.folder / out / "final" / name) for out in ("single", "parts"))
    assert single.keys() == parts.keys() and all(torch.equal(single[key], parts[key]) for key in single)


def test_result_answers_is_merged_and_is_continued(workspace: Workspace) -> None:
    run_ok(workspace, *RUN, LORA, "output_dir=run")
    run_ok(workspace, "merge", str(workspace.model), "run", "merged")
    for model in ("run", "merged"):
        run_ok(workspace, "run", "generate", "nano/generate", f"model={model}", "prompts=[Hi]", "device=cpu")
    tokenizer = AutoTokenizer.from_pretrained("merged")
    ids = tokenizer("<add><|im_end|>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2 and ids[1] in json.loads(Path("merged/generation_config.json").read_text())["eos_token_id"]
    assert AutoModelForCausalLM.from_pretrained("merged").config.vocab_size == len(tokenizer) == max(ids) + 1
    start = ("run", "sft", "sft.yaml", "max_steps=1", "model=run")
    run_ok(workspace, *start, "output_dir=more", LORA, "data.chat_template=chatml")
    indices = [
        json.loads(Path(out, "final/adapter_config.json").read_text())["trainable_token_indices"]
        for out in ("run", "more")
    ]
    assert indices[0] == indices[1] == [ids[0], ids[1] - 1, ids[1]]
    run_ok(workspace, *start, "output_dir=full", "adapter=none")
    assert len(AutoTokenizer.from_pretrained("full/final")) == len(tokenizer)
    repeated = workspace.run_tune(*start, "output_dir=again", LORA, *TOKENS)
    assert repeated.code == 2 and repeated.err.startswith("error: new_tokens: ") and "is an adapter" in repeated.err


def test_card_resizes_the_base_for_peft(workspace: Workspace) -> None:
    run_ok(workspace, *RUN, LORA, "output_dir=run")
    code = re.findall(r"```python\n(.*?)```", Path("run/final/README.md").read_text(), re.DOTALL)[0]
    loaded: dict = {}
    code = code.partition("messages")[0].replace('"run"', '"run/final"').replace('"model"', repr(str(workspace.model)))
    exec(code, loaded)
    assert loaded["model"].get_input_embeddings().weight.shape[0] == len(loaded["tokenizer"])


def test_unusable_tokens_are_one_line(workspace: Workspace) -> None:
    for option, problem in {
        "new_tokens=[plus, plus]": "new_tokens: ",
        "new_special_tokens=[<|turn|>]": "new_special_tokens: '<|turn|>' is already token",
        "new_tokens={<x>: ''}": "new_tokens.<x>: ",
        "new_tokens=<x>": "a list is written [<x>]",
        "new_tokens=null": "a list is written []",
    }.items():
        result = workspace.run_tune("run", "sft", "sft.yaml", option, "output_dir=run")
        assert result.code == 2 and problem in result.err and result.err.count("\n") == 1
    result = workspace.run_tune("run", "sft", "sft.yaml", "data.chat_template=chatml", "output_dir=run")
    assert 'new_special_tokens=["<|im_start|>", "<|im_end|>"]' in result.err


def test_plan_counts_the_rows(workspace: Workspace) -> None:
    def trained(*options: str) -> int:
        plan = json.loads(workspace.run_tune("plan", "sft.yaml", LORA, "--recipe", "sft", "--json", *options).out)
        return plan["phases"]["forward"]["gradients"]

    dim = json.loads((workspace.model / "config.json").read_text())["hidden_size"]
    assert trained(*TOKENS) - trained() == 3 * dim * 4
