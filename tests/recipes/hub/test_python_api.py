"""The Python API with a Hub: a run is pushed, and the model and datasets are opened by their names."""

from tests.helpers.recipe_runs import addition_rows
from tests.recipes.hub.conftest import Sandbox

PUSH = """
import json, tunekit
rows = [json.loads(line) for line in open("rows.jsonl")]
run = tunekit.finetune("tunekit/nano", rows, output_dir="out", device="cpu", global_batch_size=4, max_steps=2)
print(run.push("ann/sums", private=True))
print(run.model.generate("What is 3 plus 4?", max_new_tokens=8))
"""
LOAD = """
import tunekit
print(tunekit.load("ann/sums", device="cpu").generate("What is 3 plus 4?", max_new_tokens=8))
try:
    tunekit.load("ann/missing")
except tunekit.UserError as error:
    print(error)
"""


def test_pushed_run_is_loaded_by_its_name(sandbox: Sandbox) -> None:
    (sandbox.directory / "rows.jsonl").write_text(addition_rows(1, 8))
    pushed = sandbox.run_python(PUSH)
    assert pushed.code == 0, pushed.err
    url, answer = pushed.out.splitlines()
    assert url.endswith("/ann/sums") and sandbox.hub.repos["ann/sums"].private
    loaded = sandbox.run_python(LOAD)
    assert loaded.code == 0, loaded.err
    first, error = loaded.out.splitlines()
    assert first == answer and "ann/missing" in error
