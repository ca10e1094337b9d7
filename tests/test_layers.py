"""Imports point to lower layers, are at the top of the file, and never include the libraries that tests compare to."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"errors", "assets", "devices", "env_info", "system", "config", "kernels", "templates"},
    {"models", "distributed"},
    {"data", "losses", "optim", "adapters", "quantization", "checkpoint", "generation", "memory", "loggers", "hub"},
    {
        "build",
        "training",
        "distillation",
        "evaluation",
        "plan",
        "export",
        "publishing",
        "report",
        "rollouts",
        "rewards",
        "environments",
        "policy",
        "serving",
        "importers",
    },
    {"recipes", "cli", "selftest", "api"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ORACLE_PACKAGES = {"transformers", "peft", "trl", "bitsandbytes", "sentence_transformers", "openai"}
# Packages that import each other: the self-test runs recipes as the command line does.
ALLOWED_CYCLES = {("selftest", "cli")}
FILES = {f"{folder}/{path.relative_to(ROOT / folder)}": path for folder in ("tunekit", "recipes", "kernels")
         for path in sorted((ROOT / folder).rglob("*.py"))}  # fmt: skip


def package_of(file: str) -> str:
    """First name below `tunekit` of a file or of a module path."""
    folder, _, rest = file.partition("/")
    return rest.partition("/")[0].removesuffix(".py") if folder == "tunekit" else folder


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports of a module or function. Expressions contain none, and are most of a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not isinstance(node, ast.expr):
            yield from import_statements(node)


@cache
def imports(path: Path) -> list[str]:
    """Full names of all imported modules and names."""
    names = []
    for node in import_statements(parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        else:
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def package_imports() -> Iterator[tuple[str, str, str]]:
    """(file, its package, imported package) of each import between packages."""
    for file, path in FILES.items():
        for name in imports(path) if file != "tunekit/__init__.py" else ():
            first, _, rest = name.partition(".")
            package = rest.partition(".")[0]
            if first == "tunekit" and package not in (package_of(file), "__version__"):
                yield file, package_of(file), package


def test_imports_point_down_or_sideways() -> None:
    upward = [(file, to) for file, package, to in package_imports() if LEVEL[to] > LEVEL[package]]
    assert not upward


def test_packages_have_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for _, package, to in package_imports():
        if (package, to) not in ALLOWED_CYCLES:
            graph.setdefault(package, set()).add(to)
    while leaves := {to for targets in graph.values() for to in targets} - graph.keys():
        graph = {package: targets - leaves for package, targets in graph.items()}
        graph = {package: targets for package, targets in graph.items() if targets}
    assert not graph


def test_tunekit_init_imports_only_for_type_checkers() -> None:
    tree = parse(FILES["tunekit/__init__.py"])
    executed = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {node.module for node in executed if isinstance(node, ast.ImportFrom)} == {"importlib", "typing"}
    assert not [node for node in executed if isinstance(node, ast.Import)]
    (guard,) = (node for node in tree.body if isinstance(node, ast.If))
    assert isinstance(guard.test, ast.Name) and guard.test.id == "TYPE_CHECKING"


def test_oracle_packages_are_not_imported() -> None:
    assert not [
        (file, name) for file, path in FILES.items() for name in imports(path) if name.split(".")[0] in ORACLE_PACKAGES
    ]


def test_imports_are_at_the_top_of_the_file() -> None:
    blocks = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inside = [
        f"{file}:{node.lineno}"
        for file, path in FILES.items()
        for block in ast.walk(parse(path))
        if isinstance(block, blocks)
        for node in import_statements(block)
    ]
    assert not inside


def test_imports_between_parts_of_data_point_down() -> None:
    """Readers, chat templates, preprocessing, loading and inspection, each in a directory of `data`."""
    order = ("readers", "chat_template", "preprocess", "dataloader", "inspect")
    names = {name: level for level, name in enumerate(order)}
    for file, path in FILES.items():
        if file.startswith("tunekit/data/") and path.parent.name in names:
            targets = {name.split(".")[2] for name in imports(path) if name.startswith("tunekit.data.")}
            assert not [to for to in targets if names.get(to, -1) > names[path.parent.name]], file


def test_recipes_and_subcommands_do_not_import_each_other() -> None:
    for folder, prefix in (("recipes/", "tunekit.recipes."), ("tunekit/cli/commands/", "tunekit.cli.commands.")):
        files = {file: path for file, path in FILES.items() if file.startswith(folder) and path.stem != "__init__"}
        assert files
        assert not [(file, name) for file, path in files.items() for name in imports(path) if name.startswith(prefix)]


def package_graph() -> dict[str, set[str]]:
    """Packages that each package imports; without the packages that others of these import in turn."""
    graph = {name: set() for layer in LAYERS for name in layer}
    for _, package, to in package_imports():
        if (package, to) not in ALLOWED_CYCLES:
            graph[package].add(to)

    def reachable(package: str) -> set[str]:
        return graph[package].union(*map(reachable, graph[package]))

    return {package: targets - set().union(*map(reachable, targets)) for package, targets in graph.items()}


def draw_packages() -> str:
    """Mermaid diagram of the layers, highest first, and of the imports between packages."""
    lines = ["flowchart TD"]
    for level, names in reversed([*enumerate(LAYERS, start=1)]):
        lines.append(f'    subgraph layer{level}["layer {level}"]')
        lines += [f"        {name}" for name in sorted(names)]
        lines.append("    end")
    for package, targets in sorted(package_graph().items()):
        lines += [f"    {package} --> {to}" for to in sorted(targets)]
    return "\n".join(lines)


def test_documented_package_graph_is_current() -> None:
    """To update the diagram: `python -c "from tests.test_layers import draw_packages; print(draw_packages())"`."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    assert page.partition("```mermaid\n")[2].partition("\n```")[0] == draw_packages()
