"""What people install: a source archive, the wheel built from it, and that wheel at work in a fresh environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.waiting import LIMIT
from tunekit.cli import registry

ROOT = Path(__file__).parent.parent
PARTS = ("tunekit", "recipes", "kernels", "configs")
FILES = ("pyproject.toml", "setup.py", "LICENSE", "README.md")

pytestmark = pytest.mark.slow


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, itself built from a copy: a build leaves things behind, and may find old ones."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=dist)
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def tune(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in a fresh environment, which borrows the dependencies of this one, but not the package."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=home,
    )
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (site / "borrowed.pth").write_text("\n".join(places))  # a .pth found through another one is not followed
    assert run(python, "-c", "import tunekit; print(tunekit.__file__)", cwd=home).startswith(str(site))
    return home / "bin" / "tune"


def test_the_wheel_holds_every_file_and_only_under_its_own_name(wheel: Path) -> None:
    held = {name for name in ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert {name.partition("/")[0] for name in held} == {"tunekit"}
    for part in PARTS:
        kinds = {"configs": ("*.yaml",), "kernels": ("*.py", "*.cpp", "*.h")}.get(part, ("*.py",))
        for path in (path for kind in kinds for path in (ROOT / part).rglob(kind)):
            inside = path.relative_to(ROOT / part).as_posix()
            assert (f"tunekit/{inside}" if part == "tunekit" else f"tunekit/{part}/{inside}") in held
    data = [
        path
        for folder in ("bundled", "models/presets", "data/inspect")
        for path in (ROOT / "tunekit" / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert {path.relative_to(ROOT).as_posix() for path in data} <= held
    assert wheel.stat().st_size < 12e6


def test_the_installed_command_lists_what_ships(tune: Path, tmp_path: Path) -> None:
    listed = run(tune, "ls", cwd=tmp_path)
    assert all(name in listed for name in (*registry.list_recipes(), *registry.list_configs()))
    assert run(tune, "--version", cwd=tmp_path).startswith("tunekit ")


@pytest.mark.skipif("nano/tools_lora" not in registry.list_configs(), reason="needs the nano")
def test_the_installed_command_trains(tune: Path, tmp_path: Path) -> None:
    run(tune, "run", "sft", "nano/tools_lora", "max_steps=1", "output_dir=here", cwd=tmp_path)
    assert list((tmp_path / "here" / "final").glob("*.safetensors"))


def test_constraints_pin_what_the_package_needs() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    needed = {"torch", "triton", "safetensors", "huggingface-hub", "tokenizers", "datasets", "omegaconf", "tqdm"}
    assert needed <= {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}


def test_make_needs_no_second_install(tmp_path: Path) -> None:
    """With its stamps in place, `make test` goes straight to the tests."""
    for file in ("Makefile", "constraints.txt", *FILES):
        shutil.copy(ROOT / file, tmp_path)
    stamps = [tmp_path / ".venv" / name for name in ("python", "core", "dev", "triton-3.6")]
    stamps[0].parent.mkdir()
    for stamp in stamps:
        stamp.touch()
    env = {**os.environ, "MAKEFLAGS": ""}
    plan = subprocess.run(
        ["make", "--dry-run", "test"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert "pytest" in plan.stdout and "pip install" not in plan.stdout
