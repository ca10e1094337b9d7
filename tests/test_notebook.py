"""The notebook runs from its first cell to its last, in a kernel of its own, and shows what it says it shows."""

import base64
import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.waiting import LIMIT

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "first_finetune.ipynb"
STEPS, QUESTIONS = 16, 16
PARAMETERS = f"steps = {STEPS}\nheld_out = {QUESTIONS}"


def read() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebook runs."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def executed(folder: Path) -> NotebookNode:
    """The notebook after a short run: a cell behind its parameters asks for few steps and questions."""
    notebook = read()
    behind = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    notebook.cells.insert(behind + 1, nbformat.v4.new_code_cell(PARAMETERS))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
            patch.setenv(name, str(folder / name.lower()))
        place = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=LIMIT, startup_timeout=LIMIT, resources=place).execute()
    return notebook


def outputs(notebook: NotebookNode, kind: str) -> list[str]:
    """What the cells show as `kind`, from the first to the last."""
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    return [data[kind] for data in shown if kind in data]


def printed(notebook: NotebookNode) -> str:
    streams = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "stream"
    ]
    return "".join(stream.text for stream in streams if stream.name == "stdout")


def test_no_output_is_kept() -> None:
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count is not None]
    assert NOTEBOOK.stat().st_size < 50_000


@pytest.mark.slow
def test_a_run_is_trained_and_its_curve_is_drawn(executed: NotebookNode, folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "runs/first-finetune/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS and losses[-1] < 0.7 * losses[0]
    (curve,) = outputs(executed, "image/png")
    assert base64.b64decode(curve).startswith(b"\x89PNG")


@pytest.mark.slow
def test_learnt_tokens_are_coloured_and_context_is_not(executed: NotebookNode) -> None:
    (boxes,) = (html for html in outputs(executed, "text/html") if "background" in html)
    learnt = [box for box in boxes.split("<span ")[1:] if "background" in box]
    context = [box for box in boxes.split("<span ")[1:] if "background" not in box]
    assert sum("&lt;|turn|&gt;" in box for box in learnt) == 4, "each answer of the four rows is learnt with its end"
    assert sum("&lt;|user|&gt;" in box for box in context) == 4


@pytest.mark.slow
def test_the_hugging_face_libraries_open_the_result(executed: NotebookNode) -> None:
    name = "largest difference of the logits:"
    (line,) = (line for line in printed(executed).splitlines() if line.startswith(name))
    assert float(line.removeprefix(name)) < 1e-3
