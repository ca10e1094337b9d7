"""Until its first step, a run opens no file of a model more than twice, and builds the model at most twice."""

import json

import pytest

from tests.helpers.recipe_runs import Workspace
from tunekit import assets

# Writes how often each file was opened, and the number of decoders, at the first optimizer step.
COUNT_OPENS = """
import collections, json, os, pathlib, sys
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tunekit.models.decoder import Decoder
opens, decoders = collections.Counter(), []
def count_open(event, args):
    if event == "open" and isinstance(args[0], str | os.PathLike):
        opens[os.path.abspath(args[0])] += 1
def count_decoder(module, name, child):
    if isinstance(module, Decoder) and name == "embed":
        decoders.append(module)
def report(*_):
    pathlib.Path("start.json").write_text(json.dumps([opens, len(decoders)]))
    os._exit(0)
sys.addaudithook(count_open)
register_module_module_registration_hook(count_decoder)
register_optimizer_step_pre_hook(report)
"""
LORA, TOKENS = (
    "adapter={kind: lora, rank: 4}",
    ("new_tokens={<add>: plus}", "data.chat_template=chatml", "new_special_tokens=[<|im_start|>, <|im_end|>]"),
)
CONTINUED = "adapter={kind: lora, rank: 4, adapter_path: base/final}"
STARTS = {
    "full": ("run", "sft", "sft.yaml"),
    "lora": ("run", "sft", "sft.yaml", LORA),
    "dora, nf4": ("run", "sft", "sft.yaml", "adapter=dora", "quantization=nf4"),
    "adapter_path": ("run", "sft", "sft.yaml", CONTINUED),
    "adapter as model": ("run", "sft", "sft.yaml", "model=base/final", LORA),
    "new tokens": ("run", "sft", "sft.yaml", *TOKENS),
    "new tokens, lora": ("run", "sft", "sft.yaml", *TOKENS, LORA),
    "other tokenizer": ("run", "sft", "sft.yaml", f"tokenizer={assets.MODELS['tunekit/nano']}", LORA),
    "preference": ("run", "preference", "nano/dpo", "device=cpu", LORA),
    "reward": ("run", "reward", "nano/reward", "device=cpu", LORA),
    "ppo": ("run", "ppo", "nano/ppo", "device=cpu", LORA),
    "resumed": ("run", "sft", "sft.yaml", LORA, "save_every=1", "output_dir=base"),
}


@pytest.mark.parametrize("start", STARTS)
def test_start_reads_each_file_at_most_twice(start: str, workspace: Workspace) -> None:
    if "base" in str(STARTS[start]):
        workspace.kill_after(1, *STARTS["resumed"])
        if start != "resumed":
            assert workspace.run_tune(*STARTS["resumed"]).code == 0
    process = workspace.start(*STARTS[start], setup=COUNT_OPENS)
    process.join()
    assert process.exitcode == 0, workspace.log
    opens, num_decoders = json.loads((workspace.folder / "start.json").read_text())
    directories = workspace.model, workspace.folder / "base" / "final", assets.MODELS["tunekit/nano"]
    read = {file: count for file, count in opens.items() if any(file.startswith(f"{path}/") for path in directories)}
    assert read and {file: count for file, count in read.items() if count > 2} == {}
    assert num_decoders <= 2
