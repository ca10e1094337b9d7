"""The source archive, the wheel that is built from it, and the command that the wheel installs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.helpers.wait import TIMEOUT_SECONDS
from tunekit.cli import registry

ROOT = Path(__file__).parent.parent
PACKAGES = ("tunekit", "recipes", "kernels", "configs")
FILES = ("pyproject.toml", "setup.py", "LICENSE", "README.md")

pytestmark = pytest.mark.slow


def run_command(*args: str | Path, cwd: Path) -> str:
    result = subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from the source archive, which is built from a copy: builds leave files and may pick up old ones."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, source)
    run_command(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=dist)
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def tune(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tune` in a new environment that sees the dependencies of this one, but not its tunekit."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    run_command(
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
    site_packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    site = Path(run_command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    # .pth files on the path of another .pth file are ignored
    (site / "borrowed.pth").write_text("\n".join(site_packages))
    assert run_command(python, "-c", "import tunekit; print(tunekit.__file__)", cwd=home).startswith(str(site))
    return home / "bin" / "tune"


def test_wheel_contains_all_files_in_one_package(wheel: Path) -> None:
    names = {name for name in ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert {name.partition("/")[0] for name in names} == {"tunekit"}
    for package in PACKAGES:
        kinds = {"configs": ("*.yaml",), "kernels": ("*.py", "*.cpp", "*.h")}.get(package, ("*.py",))
        for path in (path for kind in kinds for path in (ROOT / package).rglob(kind)):
            relative = path.relative_to(ROOT / package).as_posix()
            assert (f"tunekit/{relative}" if package == "tunekit" else f"tunekit/{package}/{relative}") in names
    data = [
        path
        for directory in ("bundled", "models/presets", "data/inspect")
        for path in (ROOT / "tunekit" / directory).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert {"tunekit/py.typed", *(path.relative_to(ROOT).as_posix() for path in data)} <= names
    assert wheel.stat().st_size < 12e6


def test_installed_command_lists_recipes_and_configs(tune: Path, tmp_path: Path) -> None:
    output = run_command(tune, "ls", cwd=tmp_path)
    assert all(name in output for name in (*registry.list_recipes(), *registry.list_configs()))
    assert run_command(tune, "--version", cwd=tmp_path).startswith("tunekit ")


@pytest.mark.skipif("nano/tools_lora" not in registry.list_configs(), reason="needs the nano")
def test_installed_command_trains(tune: Path, tmp_path: Path) -> None:
    run_command(tune, "run", "sft", "nano/tools_lora", "max_steps=1", "output_dir=here", cwd=tmp_path)
    assert list((tmp_path / "here" / "final").glob("*.safetensors"))


def test_constraints_pin_all_dependencies() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    required = {"torch", "triton", "safetensors", "huggingface-hub", "tokenizers", "datasets", "omegaconf", "tqdm"}
    assert required <= {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}


def test_make_does_not_reinstall(tmp_path: Path) -> None:
    """With existing stamp files, `make test` installs nothing."""
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
