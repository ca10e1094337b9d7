"""The notebook runs from the first to the last cell in its own kernel and shows the results that it describes."""

import base64
import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.helpers.wait import TIMEOUT_SECONDS

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "first_finetune.ipynb"
STEPS, QUESTIONS = 16, 16
PARAMETERS = f"steps = {STEPS}\nheld_out = {QUESTIONS}"


def read_notebook() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of the notebook."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def executed(folder: Path) -> NotebookNode:
    """Executed notebook; a cell after the parameters reduces the number of steps and questions."""
    notebook = read_notebook()
    parameters_index = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    notebook.cells.insert(parameters_index + 1, nbformat.v4.new_code_cell(PARAMETERS))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
            patch.setenv(name, str(folder / name.lower()))
        resources = {"metadata": {"path": str(folder)}}
        NotebookClient(
            notebook, timeout=TIMEOUT_SECONDS, startup_timeout=TIMEOUT_SECONDS, resources=resources
        ).execute()
    return notebook


def outputs(notebook: NotebookNode, kind: str) -> list[str]:
    """Cell outputs of MIME type `kind`, in order."""
    data = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    return [data[kind] for data in data if kind in data]


def printed_text(notebook: NotebookNode) -> str:
    streams = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "stream"
    ]
    return "".join(stream.text for stream in streams if stream.name == "stdout")


def test_notebook_has_no_outputs() -> None:
    cells = [cell for cell in read_notebook().cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count is not None]
    assert NOTEBOOK.stat().st_size < 50_000


@pytest.mark.slow
def test_run_is_trained_and_its_curve_is_plotted(executed: NotebookNode, folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "runs/first-finetune/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS and losses[-1] < 0.7 * losses[0]
    (curve,) = outputs(executed, "image/png")
    assert base64.b64decode(curve).startswith(b"\x89PNG")


@pytest.mark.slow
def test_only_target_tokens_are_colored(executed: NotebookNode) -> None:
    (page,) = (html for html in outputs(executed, "text/html") if "background" in html)
    targets = [span for span in page.split("<span ")[1:] if "background" in span]
    context = [span for span in page.split("<span ")[1:] if "background" not in span]
    assert sum("&lt;|turn|&gt;" in span for span in targets) == 4, (
        "the end-of-turn token of each of the four answers is a target"
    )
    assert sum("&lt;|user|&gt;" in span for span in context) == 4


@pytest.mark.slow
def test_result_loads_in_hugging_face_libraries(executed: NotebookNode) -> None:
    name = "largest difference of the logits:"
    (line,) = (line for line in printed_text(executed).splitlines() if line.startswith(name))
    assert float(line.removeprefix(name)) < 1e-3
