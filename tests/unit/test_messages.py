"""Golden messages: the exact text of common errors. Other tests check the exception, the key and the path only."""

from pathlib import Path

import pytest

from tunekit.cli import main as cli

ROWS = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'
FILES = {
    "cut.jsonl": ROWS + '{"messages": [\n',
    "roles.jsonl": ROWS + ROWS.replace('"user"', '"robot"'),
    "sft.yaml": "recipe: sft\nmodel: tunekit/nano\noutput_dir: out\noptimizer: {lrr: 1}\n"
    "data: {kind: chat, source: cut.jsonl}\n",
    "cut.yaml": "recipe: sft\nmodel: [\n",
}
VALIDATE = "validate nano/tools_lora "
RUN = "run sft nano/tools_lora "
GOLDEN = {
    # the command line
    "trian sft": "unknown subcommand 'trian'. Run `tune --help` for a list.",
    "run sfft nano/tools_lora": "no recipe 'sfft'. Did you mean 'sft'? Run `tune ls` for a list.",
    RUN + "--ovrwrite": "unknown argument '--ovrwrite'. Did you mean '--overwrite'? Run `tune run --help`.",
    RUN + "--epochs=3": "unknown argument '--epochs=3'. Keys of the config have no dashes: epochs=3. "
    "Run `tune run --help`.",
    RUN + "--nproc-per-node 0": "argument --nproc-per-node/--gpus: must be a positive integer, got '0'. "
    "Run `tune run --help`.",
    "push nowhere": "the following arguments are required: REPO. Run `tune push --help`.",
    "options sft optimizr": "optimizr: unknown key. Did you mean 'optimizer'?",
    # configs: the file and line, or the command line, and the key
    "validate nowhere.yaml": "nowhere.yaml: no such file, and no config of tunekit has this name. "
    "Run `tune ls` for a list.",
    "validate cut.yaml": "cut.yaml:3:1: malformed YAML: expected the node content, but found '<stream end>'",
    "validate sft.yaml": "sft.yaml:4: optimizer.lrr: unknown key. Did you mean 'lr'?",
    VALIDATE + "global_batch_size": "'global_batch_size': overrides must be key=value, such as seed=1",
    VALIDATE + "global_bacth_size=4": "command line: global_bacth_size: unknown key. Did you mean 'global_batch_size'?",
    VALIDATE + "per_device_train_batch_size=4": "command line: per_device_train_batch_size: unknown key; "
    "use micro_batch_size: `global_batch_size` is the number of rows per optimizer step over all devices",
    VALIDATE + "optimizer.lr=fast": "command line: optimizer.lr: expected a number, got 'fast'",
    VALIDATE + "global_batch_size=0": "command line: global_batch_size: must be >= 1, got 0",
    VALIDATE + "adapter=lorra": "command line: adapter: unknown kind 'lorra'. Did you mean 'lora'? "
    "Available: none, lora or dora",
    VALIDATE + "output_dir=null": "command line: output_dir: expected text, got null; put text in quotes: 'null'",
    # models, devices and rows
    VALIDATE + "model=./nowhere": "./nowhere: directory not found",
    VALIDATE + "adapter.target_modules=q_porj": "adapter.target_modules: no layer matches 'q_porj'. Available: attn, "
    "mlp, all-linear, lm_head, embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.",
    VALIDATE + "device=cpu memory.activation_offloading=true": "memory.activation_offloading: requires a device with "
    "its own memory, got cpu. Set memory.activation_offloading=false.",
    VALIDATE + "data.source=nowhere.jsonl": "nowhere.jsonl: no such file or directory",
    RUN + "data.source=cut.jsonl eval_data=null": "cut.jsonl:2: malformed JSON: Expecting value at column 15",
    RUN + "data.source=roles.jsonl eval_data=null": "roles.jsonl:2: messages[0].role: unknown role 'robot'. "
    "Use one of system, developer, user, assistant, tool.",
}


@pytest.mark.parametrize(("command", "message"), GOLDEN.items(), ids=GOLDEN)
def test_golden_message(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert cli.main(command.split()) == 2
    *progress, last = capsys.readouterr().err.splitlines()
    assert last == f"error: {message}" and not progress
