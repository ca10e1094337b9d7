"""The Python API in a script of a user, in the strict mode of pyright: names, signatures and results have types."""

import json
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.wait import TIMEOUT_SECONDS

ROOT = Path(__file__).parents[3]
EXAMPLES = Path(__file__).parent / "typed_examples"
PYRIGHT = Path(sysconfig.get_path("scripts")) / "pyright"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the examples, and tunekit as it is installed: recipes and kernels are below it."""
    directory = tmp_path_factory.mktemp("project")
    package = directory / "lib" / "tunekit"
    package.mkdir(parents=True)
    for path in [*(ROOT / "tunekit").iterdir(), ROOT / "recipes", ROOT / "kernels"]:
        (package / path.name).symlink_to(path)
    for file in EXAMPLES.glob("*.txt"):
        (directory / file.with_suffix(".py").name).write_text(file.read_text())
    environment = {"venvPath": str(ROOT), "venv": ".venv", "extraPaths": ["lib"], "pythonVersion": "3.11"}
    (directory / "pyrightconfig.json").write_text(json.dumps(environment | {"include": ["*.py"]}))
    return directory


@pytest.mark.slow
def test_scripts_of_users_are_typed(project: Path) -> None:
    done = subprocess.run(
        [PYRIGHT, "--project", project, "--outputjson"], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    errors = [
        (Path(item["file"]).stem, item["range"]["start"]["line"] + 1, item["message"])
        for item in json.loads(done.stdout)["generalDiagnostics"]
    ]
    assert not [error for error in errors if error[0] != "wrong"]
    wrong = (EXAMPLES / "wrong.txt").read_text().splitlines()
    expected = {number for number, line in enumerate(wrong, start=1) if re.search(r"# error$", line)}
    assert {line for _, line, _ in errors} == expected
