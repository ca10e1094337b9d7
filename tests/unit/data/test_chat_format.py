"""Templates by name, values of template variables, and the tokens that end a turn of another chat template."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.helpers.chat_families import EMPTY, read_family_template, write_family
from tests.helpers.loss_masks import target_texts
from tunekit.config.load import load_config
from tunekit.data.chat_template.chat_format import (
    describe_unread_kwargs,
    find_end_of_turn,
    find_split_markers,
    with_chat_format,
)
from tunekit.data.chat_template.template import TEMPLATES, with_defaults
from tunekit.data.dataloader.mixture import Mixture
from tunekit.data.datasets import ChatDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.recipes.sft import SFTConfig

QUESTION = [{"role": "user", "content": "What?"}]
CONVERSATION = [*QUESTION, {"role": "assistant", "content": "That."}]
VALUES = {"quote": 'a "quoted" \\ {{ text }} %}\n😀', "number": -2, "rate": 1e-5, "on": True, "names": ["a", "b"]}
PRINTS_ALL = "{{- quote }}|{{ number + 1 }}|{{ rate }}|{{ on }}|{{ names | join }}|{{ other is defined }}"


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    (tmp_path / "qwen3").mkdir()
    return write_family(tmp_path / "qwen3", "qwen3")


def test_template_with_defaults_renders_as_with_arguments() -> None:
    def render(template: str, **kwargs: object) -> str:
        return render_jinja_template([QUESTION], chat_template=template, **kwargs)[0][0]

    expected = render(PRINTS_ALL, **VALUES)
    assert render(with_defaults(PRINTS_ALL, VALUES)) == expected
    assert render(with_defaults(PRINTS_ALL, VALUES), number=7) == render(PRINTS_ALL, **VALUES | {"number": 7})
    nested = with_defaults(with_defaults(PRINTS_ALL, VALUES), {"number": 7})
    assert render(nested) == render(PRINTS_ALL, **VALUES | {"number": 7}), "the outer default has precedence"
    assert with_defaults("\n x", {}) == "\n x" and render(with_defaults("\n x", {"y": 1})) == "\n x"


def test_template_variables_reach_prompts_and_targets(qwen3: Path) -> None:
    plain, theirs = Tokenizer.open(qwen3), AutoTokenizer.from_pretrained(qwen3)
    tokenizer = with_chat_format(plain, None, {"enable_thinking": False})
    for options, ours in (({}, plain), ({"enable_thinking": False}, tokenizer)):
        prompt = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **options)
        assert ours.render(QUESTION, prompt=True) == prompt
    assert tokenizer.render(QUESTION, prompt=True).endswith(EMPTY)
    assert target_texts(plain, CONVERSATION) == [f"{EMPTY}That.<|im_end|>"]
    assert target_texts(tokenizer, CONVERSATION) == ["That.<|im_end|>"]
    theirs.chat_template = tokenizer.template_texts["default"]
    assert theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True).endswith(EMPTY)
    assert tokenizer.digest != plain.digest, "cached rows are of one of them"


def test_end_of_turn_of_another_template_stops_generation(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "gemma2").mkdir()
    base = Tokenizer.open(write_family(tmp_path / "gemma2", "gemma2"))
    end = base.model.token_to_id("<end_of_turn>")
    assert end not in base.stops and find_end_of_turn(base) == {end}
    tokenizer = with_chat_format(base, "gemma", {})
    assert tokenizer.stops == base.stops | {end} and tokenizer.stop_texts.fullmatch("<end_of_turn>")
    assert with_chat_format(base, "alpaca", {}).stops == base.stops, "its turns end with the EOS token"
    assert find_end_of_turn(with_chat_format(base, "chatml", {})) == set()
    assert find_split_markers(with_chat_format(base, "chatml", {})) == ["<|im_start|>", "<|im_end|>"]
    assert find_split_markers(with_chat_format(Tokenizer.open(qwen3), "chatml", {})) == []


def test_names_that_a_template_does_not_read_are_reported(qwen3: Path) -> None:
    tokenizer = Tokenizer.open(qwen3)
    assert not describe_unread_kwargs(tokenizer)
    assert not describe_unread_kwargs(with_chat_format(tokenizer, None, {"enable_thinking": True}))
    message = describe_unread_kwargs(
        with_chat_format(tokenizer, None, {"enable_thinking": True, "thinking": 1, "day": ""})
    )
    assert message == "chat_template_kwargs: the chat template does not read thinking, day"


@pytest.mark.parametrize("name", ["chatmll", "missing.jinja"])
def test_unknown_template_lists_the_names(name: str) -> None:
    with pytest.raises(UserError, match=f"chat_template: '{name}' is not a file .* {', '.join(TEMPLATES)}"):
        ChatDataset("tunekit/tools", chat_template=name).check_source()


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ("{messages: x}", "chat_template_kwargs.messages: is set by the conversation"),
        ("{a-b: x}", "'a-b' is not the name of a template variable"),
        ("{day: null}", "data.chat_template_kwargs.day: expected text"),
        ("3", "data.chat_template_kwargs: expected a mapping, got 3"),
    ],
)
def test_invalid_template_variables_are_refused(kwargs: str, problem: str) -> None:
    overrides = ["model=m", "output_dir=o", "data.kind=chat", "data.source=x", f"data.chat_template_kwargs={kwargs}"]
    with pytest.raises(UserError, match=problem):
        load_config(SFTConfig, None, overrides)


def test_a_mixture_has_one_template_and_variables_per_dataset() -> None:
    members = [
        {"dataset": {"kind": "chat", "source": "a", "chat_template_kwargs": {"enable_thinking": False}}},
        {"dataset": {"kind": "chat", "source": "b"}},
        {"dataset": {"kind": "text", "source": "c"}},
    ]
    config = {"model": "m", "output_dir": "o", "data": {"kind": "mixture", "datasets": members}}
    config["data"] |= {"chat_template": "chatml", "chat_template_kwargs": {"day": "today"}}
    mixture = load_config(SFTConfig, config).data
    assert isinstance(mixture, Mixture)
    first, second, third = mixture.dataset_configs
    assert isinstance(first, ChatDataset) and isinstance(second, ChatDataset) and not isinstance(third, ChatDataset)
    assert first.chat_template == second.chat_template == "chatml"
    assert first.chat_template_kwargs == {"day": "today", "enable_thinking": False}
    assert second.chat_template_kwargs == {"day": "today"}
    members[1]["dataset"]["chat_template"] = "zephyr"
    with pytest.raises(UserError, match=r"datasets.1.dataset.chat_template: must be the same for all datasets"):
        load_config(SFTConfig, config)


def test_named_templates_are_those_of_the_package() -> None:
    assert all(read_family_template(name) == path.read_text() for name, path in TEMPLATES.items())
