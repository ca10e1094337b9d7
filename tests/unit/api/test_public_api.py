"""The names and signatures of the Python API. A change of this list is a change that users notice."""

import inspect
import subprocess
import sys
from types import FunctionType
from typing import Any

import pytest

import tunekit

MODEL, ROWS = "Model | Run | str | os.PathLike[str]", "Rows | None = None"
TRAINING = (
    f"eval_rows: {ROWS}, output_dir: str | os.PathLike[str] | None = None, callbacks: Iterable[Callback] = (), "
    "overwrite: bool = False, imports: Sequence[str] = (), **keys: Any"
)
CHAT = (
    "(self, messages: str | Conversation, *, tools: Sequence[Mapping[str, Any]] | None = None, "
    "**sampling: Unpack[SamplingOptions]) -> str"
)
FUNCTIONS = {
    "evaluate": f"(model: {MODEL}, rows: {ROWS}, *, tasks: Sequence[str] = (), "
    "baseline: Run | str | os.PathLike[str] | None = None, **keys: Any) -> DataFrame",
    "finetune": f"(model: {MODEL}, rows: {ROWS}, *, recipe: str = 'sft', "
    f"adapter: str | Mapping[str, Any] | None = 'lora', {TRAINING}) -> Run",
    "generate": f"(model: {MODEL}, rows: {ROWS}, **keys: Any) -> list[dict[str, Any]]",
    "load": "(name: str | os.PathLike[str], *, quantization: str | Mapping[str, Any] = 'none', "
    "adapter: str | os.PathLike[str] | None = None, dtype: str | torch.dtype = 'auto', device: str = 'auto', "
    "**keys: Any) -> Model",
    "run": "(config: str | os.PathLike[str] | Mapping[str, Any], "
    "values: str | os.PathLike[str] | Mapping[str, Any] | None = None, *, "
    f"rows: {ROWS}, {TRAINING.replace('output_dir: str | os.PathLike[str] | None = None, ', '')}) -> Run",
}
METHODS = {
    ("Model", "chat"): CHAT,
    ("Model", "forward"): "(self, tokens: Tensor, positions: Tensor | None = None, "
    "layout: SequenceLayout | None = None) -> Tensor",
    ("Model", "generate"): "(self, prompts: str | Sequence[str] | Sequence[Conversation], *, "
    "system_prompt: str | None = None, apply_chat_template: bool = True, max_num_seqs: int = 16, "
    "**sampling: Unpack[SamplingOptions]) -> str | list[str]",
    ("Run", "chat"): CHAT,
    ("Run", "export"): "(self, file: PathLike, *, type: str | None = None) -> Path",
    ("Run", "merge"): "(self, directory: PathLike, *, force: bool = False) -> Path",
    ("Run", "plot"): "(self) -> Figure",
    ("Run", "push"): "(self, repo: str, *, private: bool = False, merge_adapter: bool = False, "
    "revision: str | None = None, commit_message: str | None = None, token: str | None = None) -> str",
}
PROPERTIES = {"Run": {"config", "directory", "finished", "metrics", "model"}, "Model": {"device", "name", "tokenizer"}}


def signature(function: FunctionType) -> str:
    """Signature with the annotations as they are written."""
    (line,) = [" ".join(inspect.getsource(function).partition("def ")[2].split())]
    text = line[line.index("(") :].partition(': """')[0].partition(": # ")[0]
    return text.replace('"DataFrame"', "DataFrame").replace('"Figure"', "Figure").replace('"', "'")


def normalize(text: str) -> str:
    return text.replace("( ", "(").replace(", )", ")").replace(" )", ")").replace("# noqa: PLR0913 ", "")


def test_public_names() -> None:
    expected = {*FUNCTIONS, "ConfigError", "Model", "Run", "UserError", "__version__"}
    assert dir(tunekit) == tunekit.__all__ == sorted(expected)
    assert all(getattr(tunekit, name) is not None for name in expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_of_functions(name: str) -> None:
    assert normalize(signature(getattr(tunekit, name))) == FUNCTIONS[name]


@pytest.mark.parametrize(("cls", "name"), METHODS)
def test_signatures_of_methods(cls: str, name: str) -> None:
    function = vars(getattr(tunekit, cls))[name]
    assert normalize(signature(function)) == METHODS[cls, name]


def test_everything_public_is_documented() -> None:
    for name in FUNCTIONS:
        assert inspect.getdoc(getattr(tunekit, name)), name
    for cls, name in METHODS:
        assert inspect.getdoc(vars(getattr(tunekit, cls))[name]), name


def test_unknown_names_are_attribute_errors() -> None:
    names: Any = tunekit
    with pytest.raises(AttributeError, match="finetun"):
        _ = names.finetun


def test_import_is_fast_and_does_not_import_torch() -> None:
    code = """
import sys, time
start = time.perf_counter()
import tunekit
dir(tunekit), tunekit.__version__, tunekit.UserError
print(time.perf_counter() - start, "torch" in sys.modules, "numpy" in sys.modules)
"""
    results = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() for _ in "123"
    ]
    assert all(result[1:] == ["False", "False"] for result in results)
    assert min(float(result[0]) for result in results) < 0.1


def test_using_a_name_leaves_the_environment_as_it_was() -> None:
    code = "import os; before = dict(os.environ); import tunekit; tunekit.load; print(before == dict(os.environ))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
