"""Loss masks of templates without generation blocks equal those that transformers computes with blocks."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.helpers.loss_masks import render_targets
from tests.helpers.marked_templates import (
    MARKED,
    TOOLS,
    adapt,
    call_conversations,
    join_spans,
    render_in_transformers,
    text_conversations,
    write_marked,
)
from tunekit.data.tokenizer import Tokenizer

CALLING = [name for name, template in MARKED.items() if template.has_calls]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_marked(tmp_path_factory.mktemp(name), name) for name in MARKED}


def differences(directory: Path, conversations: dict[str, list[dict]], tools: list[dict] | None) -> dict[str, object]:
    """Conversations whose target texts differ from those of transformers."""
    ours, theirs = Tokenizer.open(directory), AutoTokenizer.from_pretrained(directory)
    found = {}
    for name, messages in conversations.items():
        adapted = adapt(ours, messages, tools)
        text, blocks = render_in_transformers(theirs, adapted, tools)
        try:
            rendered = render_targets(ours, adapted, tools)
        except Exception as e:
            found[name] = str(e)[:100]
            continue
        assert rendered.text == text
        if join_spans(rendered.spans) != blocks:
            found[name] = [[text[slice(*span)] for span in spans] for spans in (join_spans(rendered.spans), blocks)]
    return found


@pytest.mark.parametrize("name", MARKED)
def test_turns_of_texts_are_found(name: str, directories: dict[str, Path]) -> None:
    assert differences(directories[name], text_conversations(), None) == {}


@pytest.mark.parametrize("name", CALLING)
def test_turns_of_calls_are_found(name: str, directories: dict[str, Path]) -> None:
    assert differences(directories[name], call_conversations(MARKED[name]), TOOLS) == {}
