"""The shape of the house: imports point down, stand at the top of the file, and never reach for an oracle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"errors", "bundled", "curves", "discreet", "pages", "timeline"},
    {"devices"},
    {"machine", "device_to_host"},
    {"parallel", "kernels", "config"},
    {"models", "optimizers", "offload"},
    {
        "adapters",
        "formats",
        "memory",
        "precision",
        "data",
        "optim",
        "metrics",
        "guard",
        "profile",
        "loggers",
        "nano",
        "layout",
    },
    {"checkpoint", "losses", "leaks", "generate", "hub"},
    {"assemble", "evaluation", "forgetting", "on_policy", "origin", "stored", "usage"},
    {"verify", "card", "export", "look", "plan", "teacher"},
    {"publish"},
    {"training"},
    {"reference"},
    {"recipes"},
    {"catalog"},
    {"launch"},
    {"selftest"},
    {"commands", "cli"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ORACLES = {"transformers", "peft", "trl", "bitsandbytes"}
FILES = {f"{folder}/{path.relative_to(ROOT / folder)}": path for folder in ("tunekit", "recipes", "kernels")
         for path in sorted((ROOT / folder).rglob("*.py"))}  # fmt: skip


def part(file: str) -> str:
    """The part of the house that a file belongs to, the first name under `tunekit`."""
    folder, _, rest = file.partition("/")
    return rest.partition("/")[0].removesuffix(".py") if folder == "tunekit" else folder


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES)
def test_imports_point_down(file: str) -> None:
    here = part(file)
    if here == "__init__":
        assert not list(imports(FILES[file])), "the package itself imports nothing"
        return
    for name in imports(FILES[file]):
        first, _, rest = name.partition(".")
        assert first not in ORACLES, f"{file} imports {name}, which is for tests to compare with"
        there = rest.partition(".")[0]
        assert first != "tunekit" or there in (here, "__version__") or LEVEL[there] < LEVEL[here], (
            f"{file} imports {name}"
        )


@pytest.mark.parametrize("file", FILES)
def test_imports_stand_at_the_top(file: str) -> None:
    tree = ast.parse(FILES[file].read_text("utf-8"))
    blocks = (
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    )
    inside = [node for block in blocks for node in ast.walk(block) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not inside, [f"{file}:{node.lineno}" for node in inside]


def test_recipes_verbs_and_models_do_not_import_each_other() -> None:
    for file, path in FILES.items():
        if part(file) in ("recipes", "commands") and path.stem != "__init__":
            assert not [name for name in imports(path) if name.startswith(f"tunekit.{part(file)}.")], file
