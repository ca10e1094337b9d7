"""Runs in the kernel of a notebook: a figure that changes, no warnings about widgets, and errors in one line."""

import base64

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.helpers.recipe_runs import addition_rows
from tests.helpers.wait import TIMEOUT_SECONDS

pytestmark = pytest.mark.slow
CELLS = [
    "import json, signal, tunekit\nrows = [json.loads(line) for line in open('rows.jsonl')]\ntunekit.load",
    "keys = {'device': 'cpu', 'global_batch_size': 4, 'max_steps': 3, 'output_dir': 'out'}\n"
    "tunekit.finetune('tunekit/nano', rows, **keys)",
    "tunekit.finetune('tunekit/nano', rows, adaptr='lora')",
    "def interrupt(metrics):\n    if metrics['step'] == 1:\n        signal.raise_signal(signal.SIGINT)\n"
    "run = tunekit.finetune('tunekit/nano', rows, **{**keys, 'output_dir': 'stopped'}, callbacks=[interrupt])\nrun",
    "def reward(completions, **columns):\n    return [missing for _ in completions]\n"
    "prompts = [{'prompt': row['messages'][0]['content']} for row in rows]\n"
    "tunekit.finetune('tunekit/nano', prompts, recipe='grpo', rewards=reward, device='cpu', max_steps=1)",
    "tunekit.run('nano/tools_lora', data={'max_samples': 4}, device='cpu', max_steps=1, eval_data=None).plot()",
]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[NotebookNode]:
    """Executed cells."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "rows.jsonl").write_text(addition_rows(1, 12))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
            patch.setenv(name, str(folder / name.lower()))
        options = {"timeout": TIMEOUT_SECONDS, "startup_timeout": TIMEOUT_SECONDS, "allow_errors": True}
        NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, **options).execute()
    return notebook.cells


def text_of(cell: NotebookNode, stream: str) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == stream)


def error_of(cell: NotebookNode) -> list[str]:
    (error,) = (output for output in cell.outputs if output.output_type == "error")
    assert error.ename in ("UserError", "ConfigError")
    return error.traceback


def test_progress_is_one_line_and_one_figure_that_change(cells: list[NotebookNode]) -> None:
    shown = [output.data for output in cells[1].outputs if output.output_type == "display_data"]
    line, picture = shown
    assert line["text/plain"].startswith("step 3/3: loss ")
    assert base64.b64decode(picture["image/png"]).startswith(b"\x89PNG")
    assert "step 1/3" not in text_of(cells[1], "stderr")
    (result,) = (output.data for output in cells[1].outputs if output.output_type == "execute_result")
    assert result["text/plain"] == "Run('out': finished, step 3)"


def test_there_are_no_warnings(cells: list[NotebookNode]) -> None:
    assert not [cell for cell in cells if "Warning" in text_of(cell, "stderr")]


def test_errors_have_one_line(cells: list[NotebookNode]) -> None:
    (line,) = error_of(cells[2])
    assert line.startswith("ConfigError: finetune(...): adaptr: unknown key")
    (line,) = error_of(cells[4])
    assert "rewards.0 (reward)" in line and ":2: NameError" in line


def test_interrupt_returns_an_unfinished_run(cells: list[NotebookNode]) -> None:
    (result,) = (output.data for output in cells[3].outputs if output.output_type == "execute_result")
    assert "not finished" in result["text/plain"] and "stopped by SIGINT after step 1" in text_of(cells[3], "stderr")


def test_figures_are_shown(cells: list[NotebookNode]) -> None:
    pictures = [output.data["image/png"] for output in cells[5].outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2  # of the run, and the result of the cell
