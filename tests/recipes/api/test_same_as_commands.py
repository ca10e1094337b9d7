"""Calls from Python compute the same bits as the commands of `tune`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tunekit
from tests.helpers.recipe_runs import Workspace, addition_rows
from tunekit import assets

TIMELESS = ["loss", "eval/loss", "grad_norm", "lr"]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def keys(workspace: Workspace, **changes: Any) -> dict[str, Any]:
    """The keys of sft.yaml."""
    shared = {"precision": {"compute_dtype": "fp32"}, "device": "cpu", "save_every": 100, "eval_every": 3}
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 6, "data": {"max_length": 64, "kind": "chat"}}
    return {"model": workspace.model, "adapter": "none"} | shared | sizes | changes


@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 4, "dropout": 0.1}])
def test_rows_in_memory_train_as_rows_in_a_file(workspace: Workspace, adapter: Any) -> None:
    words = [] if adapter is None else ["adapter={kind: lora, rank: 4, dropout: 0.1}"]
    assert workspace.run_tune("run", "sft", "sft.yaml", *words).code == 0
    rows, eval_rows = rows_of(Path("rows.jsonl")), rows_of(Path("held.jsonl"))
    run = tunekit.finetune(rows=rows, eval_rows=eval_rows, output_dir="api", **keys(workspace, adapter=adapter))
    assert run.finished and workspace.is_same_run("out", "api")
    logged = workspace.deterministic_metrics("out")
    losses = [line["loss"] for line in logged if "loss" in line]
    assert run.metrics["loss"].dropna().tolist() == losses
    assert run.config["data"]["source"] == "api/data/train.jsonl"
    assert rows_of(Path("api/data/train.jsonl")) == rows


def test_config_of_a_run_repeats_it_on_the_command_line(workspace: Workspace) -> None:
    run = tunekit.finetune(rows=rows_of(Path("rows.jsonl")), output_dir="api", **keys(workspace))
    assert workspace.run_tune("run", "sft", str(run.directory / "config.yaml"), "output_dir=again").code == 0
    assert workspace.is_same_run("api", "again")


@pytest.mark.parametrize("recipe", ["preference", "grpo", "embed"])
def test_recipes_run_as_on_the_command_line(workspace: Workspace, recipe: str) -> None:
    name = {"preference": "nano/dpo", "grpo": "nano/grpo", "embed": "nano/embed"}[recipe]
    sizes = {"global_batch_size": 8, "micro_batch_size": 8, "max_steps": 2, "device": "cpu"}
    words = [f"{key}={value}" for key, value in sizes.items()]
    assert workspace.run_tune("run", recipe, name, *words, "eval_data=null", "output_dir=out").code == 0
    run = tunekit.run(name, eval_data=None, output_dir="api", **sizes)
    assert run.config["recipe"] == recipe and workspace.is_same_run("out", "api")
    given = tunekit.run(recipe, run.config, output_dir="given")
    assert workspace.is_same_run("api", "given") and given.finished


def test_generate_answers_as_the_recipe(workspace: Workspace, memorized_run: Path) -> None:
    prompts, options = ["What is 1 plus 1?", "What is 2 plus 4?", "Hello"], ["device=cpu", "sampling.max_new_tokens=16"]
    words = ["nano/generate", f"model={memorized_run}", f"prompts={json.dumps(prompts)}", *options]
    assert workspace.run_tune("run", "generate", *words, "output_path=answers.jsonl").code == 0
    expected = [row["answer"] for row in rows_of(Path("answers.jsonl"))]
    model = tunekit.load(memorized_run, device="cpu")
    assert model.generate(prompts, max_new_tokens=16) == expected and any(expected)
    assert model.generate(prompts[0], max_new_tokens=16) == expected[0]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    assert model.generate(conversations, max_new_tokens=16) == expected
    assert model.chat(prompts[0], max_new_tokens=16, temperature=0) == expected[0]
    lines = tunekit.generate(memorized_run, prompts=prompts, sampling={"max_new_tokens": 16}, device="cpu")
    assert [line["answer"] for line in lines] == expected
    separators = tunekit.generate(memorized_run, prompts=["Hi\u2028\x85"], sampling={"max_new_tokens": 1}, device="cpu")
    assert len(separators) == 1 and separators[0]["prompt"] == "Hi\u2028\x85"
    sampled = ["output_path=sampled.jsonl", "sampling.temperature=1", "sampling.seed=3"]
    assert workspace.run_tune("run", "generate", *words, *sampled).code == 0
    answers = model.generate(prompts, max_new_tokens=16, temperature=1.0, seed=3)
    assert answers == [row["answer"] for row in rows_of(Path("sampled.jsonl"))]


def test_evaluate_measures_as_the_recipe(workspace: Workspace, memorized_run: Path) -> None:
    Path("rows.jsonl").write_text(addition_rows(1, 6))
    options = ["data={kind: chat, source: rows.jsonl, max_length: 64}", "device=cpu", "sampling.max_new_tokens=16"]
    words = ["nano/tools", f"model={memorized_run}", "baseline=null", "batch_size=4", *options]
    assert workspace.run_tune("run", "evaluate", *words, "output_path=results.json").code == 0
    (task,) = json.loads(Path("results.json").read_text())["models"][0]["tasks"].values()
    keys: dict[str, Any] = {"batch_size": 4, "sampling": {"max_new_tokens": 16}, "data": {"max_length": 64}}
    (memorized_run / "evaluation.json").unlink(missing_ok=True)
    from_file = tunekit.evaluate(memorized_run, Path("rows.jsonl"), device="cpu", **keys)
    assert (memorized_run / "evaluation.json").is_file()
    in_memory = tunekit.evaluate(tunekit.load(memorized_run, device="cpu"), rows_of(Path("rows.jsonl")), **keys)
    for table in (from_file, in_memory):
        assert table.index.get_level_values("model").tolist() == [str(memorized_run)]
        (values,) = table.to_dict("records")
        assert values == {name: task[name]["value"] for name in values} and values["exact_match"] > 0.5
    assert in_memory.index.get_level_values("task").tolist() == ["rows"]


def test_merge_and_export_write_the_files_of_the_commands(workspace: Workspace) -> None:
    run = tunekit.finetune(rows=rows_of(Path("rows.jsonl")), output_dir="api", **keys(workspace, adapter="lora"))
    merged = run.merge("merged")
    assert workspace.run_tune("merge", str(workspace.model), "api", "expected").code == 0
    first, second = (load_file(directory / "model.safetensors") for directory in (merged, Path("expected")))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(tunekit.UserError, match="already exists"):
        run.merge("merged")
    exported = run.export("model.gguf", type="f32")
    assert workspace.run_tune("export", "api", "expected.gguf", "--type", "f32").code == 0
    assert exported.read_bytes() == Path("expected.gguf").read_bytes()


def test_quantized_model_answers_as_the_command(workspace: Workspace) -> None:
    words = ["nano/generate", "device=cpu", "quantization=nf4", "sampling.max_new_tokens=16"]
    assert workspace.run_tune("run", "generate", *words, "output_path=answers.jsonl").code == 0
    lines = rows_of(Path("answers.jsonl"))
    model = tunekit.load("tunekit/nano", quantization="nf4", device="cpu")
    assert model.generate([line["prompt"] for line in lines], max_new_tokens=16) == [line["answer"] for line in lines]


def test_load_puts_an_adapter_on_a_model(workspace: Workspace) -> None:
    run = tunekit.finetune(rows=rows_of(Path("rows.jsonl")), output_dir="api", **keys(workspace, adapter="lora"))
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        base, trained, on_base = (
            tunekit.load(name, adapter=adapter, device="cpu", dtype=torch.float32)(tokens)
            for name, adapter in ((workspace.model, None), (run.directory, None), (workspace.model, run.directory))
        )
    assert torch.equal(trained, on_base) and not torch.equal(trained, base)
    with pytest.raises(tunekit.UserError, match="adapter"):
        tunekit.load(run.directory, adapter=run.directory)


def test_nano_is_the_bundled_model() -> None:
    model = tunekit.load("tunekit/nano", device="cpu")
    file = load_file(assets.MODELS["tunekit/nano"] / "model.safetensors")
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(tensor.numel() for tensor in file.values())
