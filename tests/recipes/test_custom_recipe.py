"""A copy of recipes/sft.py with the changes that docs/recipes.md describes."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```py\n(.*?)```", (ROOT / "docs/recipes.md").read_text("utf-8"), re.DOTALL)


def block_with(text: str) -> str:
    (block,) = [block for block in BLOCKS if text in block]
    return block


def replace_once(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, old
    return source.replace(old, new)


@pytest.fixture
def recipe(workspace) -> Path:
    """`my_sft.py` with a weight penalty, a metric, an average of the weights, and a key."""
    assert workspace.run_tune("cp", "sft", "my_sft.py").code == 0
    path = workspace.folder / "my_sft.py"
    source = path.read_text("utf-8")
    first_line = "        loss = cfg.loss(model, batch.to(dist.device)) / denominator\n"
    source = replace_once(source, first_line, block_with("1e-4 *"))
    log = "            step.log(loss, grad_norm, **cfg.loss.pop_metrics(model, dist))\n"
    source = replace_once(source, log, block_with("num_batches=") + block_with("ema.copy_to"))
    source = replace_once(source, "\n\n@dataclass(", f"\n\n{block_with('class EMA')}\n\n@dataclass(")
    start = "        for step in loop.start(model, optimizer, partial(evaluate, model, eval_data, dist)):\n"
    source = replace_once(source, start, block_with("ema=ema"))
    source = replace_once(source, "            optimizer.step()\n", block_with("ema.update"))
    loss_field = "    loss: CrossEntropy = CrossEntropy()\n"
    source = replace_once(source, loss_field, loss_field + block_with("ema_decay: float"))
    source = replace_once(source, "ema = EMA(model)", "ema = EMA(model, cfg.ema_decay)")
    path.write_text(source, "utf-8")
    return path


def read_metrics(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_custom_recipe_changes_loss_metrics_and_result(workspace, recipe: Path) -> None:
    assert workspace.run_tune("run", "sft", "sft.yaml", "output_dir=plain").code == 0
    done = workspace.run_tune("run", "my_sft.py", "sft.yaml", "output_dir=custom", "ema_decay=0.5")
    assert done.code == 0, done.err
    plain, custom = (read_metrics(workspace.folder / name) for name in ("plain", "custom"))
    steps = [line for line in custom if "loss" in line]
    assert all(line["num_batches"] >= 1 for line in steps)
    assert steps[0]["loss"] > next(line["loss"] for line in plain if "loss" in line), "the penalty is part of the loss"
    final = load_file(workspace.folder / "custom/final/model.safetensors")
    other = load_file(workspace.folder / "plain/final/model.safetensors")
    assert any(not torch.equal(final[name], other[name]) for name in final)


def stop_at(recipe: Path, step: int) -> str:
    """Make the recipe fail at the beginning of a step. Returns its source from before."""
    source = recipe.read_text("utf-8")
    line = "            loss = forward_backward("
    stop = f"            if step.number == {step}:\n                raise RuntimeError\n{line}"
    recipe.write_text(replace_once(source, line, stop), "utf-8")
    return source


def test_average_of_weights_survives_a_stop(workspace, recipe: Path) -> None:
    assert workspace.run_tune("run", "my_sft.py", "sft.yaml", "output_dir=whole").code == 0
    for step in (2, 4):
        source = stop_at(recipe, step)
        assert workspace.run_tune("run", "my_sft.py", "sft.yaml", "output_dir=resumed", "save_every=1").code == 1
        recipe.write_text(source, "utf-8")
    resumed = workspace.run_tune("run", "my_sft.py", "sft.yaml", "output_dir=resumed", "save_every=1")
    assert resumed.code == 0 and "resuming from step 4 of 6" in resumed.err, resumed.err
    unbroken, resumed = (
        load_file(workspace.folder / name / "final/model.safetensors") for name in ("whole", "resumed")
    )
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


def test_average_of_the_best_step_is_exported(workspace, recipe: Path) -> None:
    """The best step here has the highest loss: it is the first that is evaluated."""
    args = ("my_sft.py", "sft.yaml", "ema_decay=0.5", "lr_scheduler=constant")
    best = ("eval_every=2", "load_best_model_at_end=true", "greater_is_better=true")
    done = workspace.run_tune("run", *args, *best, "output_dir=best")
    assert done.code == 0 and "after step 2. The result has the weights of this step" in done.err, done.err
    assert workspace.run_tune("run", *args, "output_dir=short", "max_steps=2").code == 0
    expected, actual = (load_file(workspace.folder / name / "final/model.safetensors") for name in ("short", "best"))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_state_of_another_recipe_is_refused(workspace, recipe: Path) -> None:
    source = stop_at(recipe, 2)
    assert workspace.run_tune("run", "my_sft.py", "sft.yaml", "save_every=1").code == 1
    recipe.write_text(replace_once(source, ", ema=ema)", ")"), "utf-8")
    done = workspace.run_tune("run", "my_sft.py", "sft.yaml", "save_every=1")
    assert done.code == 2
    assert "ema" in done.err and "--overwrite" in done.err


def test_copy_of_the_loop_changes_the_order_of_events(workspace) -> None:
    """The copied recipe imports the copied loop, which logs a line after each step."""
    for name, path in (("sft", "my_sft.py"), ("train_loop", "my_loop.py")):
        assert workspace.run_tune("cp", name, path).code == 0
    recipe, loop = workspace.folder / "my_sft.py", workspace.folder / "my_loop.py"
    source = replace_once(
        recipe.read_text("utf-8"), "from tunekit.training.train_loop import TrainLoop\n", block_with("from my_loop")
    )
    recipe.write_text(source, "utf-8")
    after_step = "            self.finish_step(step)\n"
    line = '            self.run.dist.log(f"step {step.number} is done")\n'
    loop.write_text(replace_once(loop.read_text("utf-8"), after_step, after_step + line), "utf-8")
    done = workspace.run_tune("run", "my_sft.py", "sft.yaml", "output_dir=custom", "max_steps=2")
    assert done.code == 0, done.err
    assert "step 0 is done" in done.err and "step 1 is done" in done.err
    assert (workspace.folder / "custom/final/README.md").is_file()
