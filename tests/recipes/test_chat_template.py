"""The chat template of a run, with the values of its variables, is in the result and in all that is made of it."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.helpers.chat_families import EMPTY, read_family_template
from tests.helpers.recipe_runs import Workspace
from tunekit import assets
from tunekit.data.chat_template.template import TEMPLATES
from tunekit.data.inspect.token_display import TokenRole
from tunekit.data.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "What is 1 plus 1?"}]
CHATML_PROMPT = "<|begin|><|im_start|>user\nWhat is 1 plus 1?<|im_end|>\n<|im_start|>assistant\n"
RUN = ("run", "sft", "sft.yaml", "model=base", "max_steps=1", "output_dir=run")
IM_END = 7


def copy_base(source: Path, path: Path) -> Path:
    """Copy a checkpoint without its chat template, with the tokens of ChatML."""
    shutil.copytree(source, path)
    (path / "chat_template.jinja").unlink()
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace("<|system|>", "<|im_start|>").replace("<|tool|>", "<|im_end|>"))
    return path


@pytest.fixture
def base(workspace: Workspace) -> Path:
    return copy_base(workspace.model, workspace.folder / "base")


def prompt_of(directory: Path, **options: object) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **options)


def stop_ids(directory: Path) -> list[int]:
    return json.loads((directory / "generation_config.json").read_text())["eos_token_id"]


def run_ok(workspace: Workspace, *args: str) -> str:
    result = workspace.run_tune(*args)
    assert result.code == 0, result.err
    return result.err


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_result_has_the_template_of_the_run(adapter: str, workspace: Workspace, base: Path) -> None:
    run_ok(workspace, *RUN, f"adapter={adapter}", "data.chat_template=chatml")  # eval_data inherits it
    final = workspace.folder / "run/final"
    assert (final / "chat_template.jinja").read_text() == TEMPLATES["chatml"].read_text()
    assert prompt_of(final) == CHATML_PROMPT
    assert stop_ids(base) == [3, 2] and stop_ids(final) == [2, 3, IM_END]
    for model in ("run", "run/final"):
        run_ok(workspace, "run", "generate", "nano/generate", f"model={model}", "prompts=[Hi]", "device=cpu")
    if adapter == "lora":
        run_ok(workspace, "merge", "base", "run", "merged", "--force")
        merged = workspace.folder / "merged"
        assert prompt_of(merged) == CHATML_PROMPT and stop_ids(merged) == stop_ids(final)


def test_markers_that_are_no_tokens_are_an_error_of_validate(workspace: Workspace) -> None:
    """Without a token at their end, answers would not stop. The error has the fix."""
    args = ("validate", "sft.yaml", "--recipe", "sft", "data.chat_template=chatml")
    error = workspace.run_tune(*args)
    assert error.code == 2 and error.err.startswith("error: data.chat_template: answers end with <|im_end|>, which ")
    fix = 'new_special_tokens=["<|im_start|>", "<|im_end|>"]'
    assert fix in error.err
    for change in (fix, "data_checks=warn"):
        run_ok(workspace, *args, change)


@pytest.mark.parametrize("first_line", ["", "{{ raise_exception('System role required') }}"])
def test_only_markers_after_answers_are_errors(first_line: str, workspace: Workspace) -> None:
    """Markers of other branches may be several tokens, also in a template that renders no question alone."""
    template = first_line + "{% for m in messages %}{{ m.content }}{{ eos_token }}{% if m.image %}<|image|>{% endif %}"
    Path("own.jinja").write_text(template + "{% endfor %}")
    run_ok(workspace, "validate", "sft.yaml", "--recipe", "sft", "data.chat_template=own.jinja")


def test_classifiers_need_no_token_at_the_end_of_answers(workspace: Workspace) -> None:
    Path("classes.jsonl").write_text(
        "".join(json.dumps({"text": f"Is {n} even?", "label": n % 2}) + "\n" for n in range(8))
    )
    data = "data={kind: labeled, source: classes.jsonl, chat_template: chatml}"
    options = ("loss={kind: classification, num_labels: 2}", "eval_data=null")
    run_ok(workspace, "validate", "nano/reward", data, *options)


def test_values_of_template_variables_are_defaults_of_the_result(workspace: Workspace) -> None:
    base = copy_base(assets.MODELS["tunekit/nano"], workspace.folder / "base")
    Path("qwen3.jinja").write_text(read_family_template("qwen3"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ 'of the base' }}"}))
    options = ("data.chat_template=qwen3.jinja", "data.chat_template_kwargs.enable_thinking=false")
    run_ok(workspace, *RUN, "adapter=lora", *options, "data.chat_template_kwargs.date=x", "data_checks=warn")
    final = workspace.folder / "run/final"
    assert "chat_template" not in json.loads((final / "tokenizer_config.json").read_text())
    assert prompt_of(final).endswith(EMPTY) and not prompt_of(final, enable_thinking=True).endswith(EMPTY)
    answer = ("run", "generate", "nano/generate", "model=run", "prompts=[Hi]", "device=cpu", "output_path=a.jsonl")
    answers, off = set(), "chat_template_kwargs.enable_thinking=false"
    for thinking in ((), (off,), (off.replace("false", "true"),)):
        run_ok(workspace, *answer, *thinking, "sampling.max_new_tokens=30")
        answers.add(Path("a.jsonl").read_text())
    assert len(answers) == 2, "the default is that of the run, and can be overridden"
    shown = workspace.run_tune("data", "sft.yaml", "model=base", *options, "--json").out
    (span,) = json.loads(shown)["rows"][0]["spans"]
    roles, tokens = span["roles"], span["tokens"]
    targets = [token for token, role in zip(tokens, roles, strict=True) if role == TokenRole.TARGET]
    assert Tokenizer.open(base).decode(targets, special=True) == "It is 2!<|im_end|>"


def test_models_without_a_template_are_used_with_a_named_one(workspace: Workspace, base: Path) -> None:
    args = ("run", "generate", "nano/generate", "model=base", "prompts=[Hi]", "device=cpu")
    missing = workspace.run_tune(*args)
    assert missing.code == 2 and "no chat template" in missing.err
    assert all(name in missing.err for name in ("chat_template", "--chat-template", "apply_chat_template=false"))
    assert not run_ok(workspace, *args, "chat_template=chatml")
    warning = run_ok(workspace, *args, "chat_template=chatml", "chat_template_kwargs.enable_thinking=false")
    assert warning == "warning: chat_template_kwargs: the chat template does not read enable_thinking\n"
    unknown = workspace.run_tune(*args, "chat_template=chatmll")
    assert unknown.code == 2 and "chat_template: 'chatmll' is not a file" in unknown.err
    data = "data={kind: chat, source: held.jsonl, max_length: 64}"
    evaluate = ("run", "evaluate", "nano/tools", "model=base", "baseline=null", data, "device=cpu", "limit=1")
    run_ok(workspace, *evaluate, "chat_template=chatml")
    assert workspace.run_tune(*evaluate).code == 2


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_other_templates_of_the_base_are_kept(adapter: str, workspace: Workspace, base: Path) -> None:
    (base / "chat_template.jinja").write_text(TEMPLATES["chatml"].read_text())
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tool_use.jinja").write_text("{{ day }}")
    run_ok(workspace, *RUN, f"adapter={adapter}")
    template = workspace.folder / "run/final/additional_chat_templates/tool_use.jinja"
    assert template.read_text() == "{{ day }}"
    run_ok(workspace, *RUN, f"adapter={adapter}", "data.chat_template_kwargs.day=Sunday", "--overwrite")
    tokenizer = AutoTokenizer.from_pretrained(workspace.folder / "run/final")
    assert tokenizer.apply_chat_template(QUESTION, tools=[{"name": "add"}], tokenize=False) == "Sunday"
