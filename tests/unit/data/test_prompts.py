"""Prompts of rows are the same in all formats of rows, and for all that answers them: recipes and the server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from tests.helpers.chat_families import write_family
from tests.helpers.encode_rows import encode_document
from tunekit.data.check_target import NO_READERS
from tunekit.data.dataloader.prompt_data import PromptDataset
from tunekit.data.datasets import ChatDataset
from tunekit.data.prompts import read_prompt
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.transforms import Filter, RenameColumns
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.evaluation.evaluation_rows import EvaluationRow, add_prompts, iter_questions
from tunekit.recipes.generate import GenerateConfig
from tunekit.rollouts.prompts import encode_prompts, open_prompts, read_prompts
from tunekit.serving.prompts import PromptMaker
from tunekit.serving.request_fields import parse_chat_request, parse_completion_request

USER = {"role": "user", "content": "What is 3 plus 4?"}
ANSWER = {"role": "assistant", "content": "7"}
CALL = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": '{"x": 3, "y": 4}'}}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "7"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SHAREGPT = [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "7"}]
FORMS: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER]},
    {"messages": [USER, {"role": "assistant", "content": "8"}, ANSWER]},
    {"messages": json.dumps([USER, ANSWER])},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}, ANSWER]},
    {"prompt": [USER], "answer": "7"},
    {"prompt": [USER, ANSWER]},
    {"prompt": USER["content"], "answer": "7"},
    {"prompt": None, "messages": [USER, ANSWER]},
    {"prompt": json.dumps([USER]), "answer": "7"},
    {"prompt": SHAREGPT},
    {"conversations": SHAREGPT},
    {"conversations": json.dumps(SHAREGPT)},
    {"conversation": [USER, ANSWER]},
    {"instruction": USER["content"], "output": "7"},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER, ANSWER],
    "system": [{"role": "system", "content": "Be brief."}, USER, ANSWER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER, ANSWER],
    "turns": [USER, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}],
    "call": [USER, CALL],
    "result": [USER, CALL, RESULT, ANSWER],
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(write_family(tmp_path_factory.mktemp("qwen"), "qwen2"))


@pytest.mark.parametrize("row", FORMS, ids=str)
def test_all_forms_of_rows_give_the_same_prompt(row: dict[str, Any]) -> None:
    prompt = read_prompt(row)
    assert prompt.conversation.messages == [USER]
    assert prompt.columns == {"answer": "7", **row}
    assert read_prompt({"answer": None, **row}).columns["answer"] == "7"  # null: as without the column


@pytest.mark.parametrize("row", [
    {"prompt": 5}, {"prompt": ""}, {"prompt": []}, {"messages": None}, {}, {"text": "a"}, {"messages": [ANSWER]},
    {"messages": [{"role": "system", "content": "Be brief."}]}, {"instruction": "a"},
], ids=str)  # fmt: skip
def test_rows_without_a_prompt_are_errors_with_their_place(tmp_path: Path, row: dict[str, Any]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(row or {"id": 1}))
    with pytest.raises(UserError, match=r"^\S+rows.jsonl:2: "):
        list(read_prompts(GenerateConfig(model="m", source=str(file))))


def test_transforms_change_the_rows_of_a_source_and_no_other_prompts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": text, "n": number}) + "\n" for number, text in enumerate("abc")))
    transforms = Filter({"n": (1, 2)}), RenameColumns({"q": "prompt"})
    config = GenerateConfig(model="m", source=str(file), prompts=("first",), transforms=transforms)
    prompts = [*read_prompts(config)]
    assert [(where.rpartition(":")[2], prompt.text) for where, prompt in prompts] == [
        ("prompts.0", "first"), ("2", "b"), ("3", "c")
    ]  # fmt: skip
    assert prompts[1][1].columns == {"prompt": "b", "n": 1}
    with pytest.raises(UserError, match=r"rows.jsonl:1: "):
        [*read_prompts(replace(config, transforms=(Filter({"other": 1}),)))]
    with pytest.raises(UserError, match="^source: "):
        none_left = replace(config, prompts=(), transforms=(Filter({"n": 7}),))
        open_prompts(none_left, NO_READERS, DistributedContext.single_process())
    with pytest.raises(FieldError) as error:
        replace(config, source=None)
    assert error.value.field == "transforms"


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_recipes_and_the_server_read_the_same_prompt(qwen: Tokenizer, tmp_path: Path, name: str) -> None:
    """With this template, these are also the tokens of the row in training, which distillation continues."""
    messages, file = CONVERSATIONS[name], tmp_path / "rows.jsonl"
    row = {"messages": messages, "tools": TOOLS}
    file.write_text(json.dumps(row))
    config = GenerateConfig(model="m", source=str(file))
    (generate,) = encode_prompts(config, read_prompts(config), qwen)
    policy = encode_document(PromptDataset("x"), qwen, row).tokens.tolist()
    document, chats = encode_document(ChatDataset("x"), qwen, row), ChatDataset("x")
    (question,) = iter_questions(add_prompts([EvaluationRow("", document)], [Row("", row)], chats, qwen), qwen)
    request = parse_chat_request({"model": "m", "messages": messages[:-1], "tools": TOOLS})
    (served,) = PromptMaker(qwen, 4096, None).make_prompts(request)
    assert generate.tokens == policy == question.prompt == served.tokens
    assert document.tokens[: len(policy)].tolist() == policy


@pytest.mark.parametrize("family", ["qwen2", "alpaca", "llama2", "gemma3", "phi3", "command_r", "gpt_oss"])
def test_developer_messages_are_system_messages(tmp_path: Path, family: str) -> None:
    """In training and in prompts."""
    tokenizer = Tokenizer.open(write_family(tmp_path, family))
    rows = [{"messages": CONVERSATIONS[name]} for name in ("developer", "system")]
    for data in (ChatDataset("x"), PromptDataset("x")):
        developer, system = (encode_document(data, tokenizer, row).tokens.tolist() for row in rows)
        assert developer == system


def test_templates_that_know_the_developer_role_get_it(qwen: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "roles.jinja"
    template.write_text(
        "{% for m in messages %}{{ {'developer': 'DEV'}[m.role] or m.role }} {{ m.content }}{% endfor %}"
    )
    data = PromptDataset("x", chat_template=str(template))
    tokens = encode_document(data, qwen, {"messages": CONVERSATIONS["developer"]}).tokens.tolist()
    assert qwen.decode(tokens) == f"DEV Be brief.user {USER['content']}"


def test_system_prompts_are_for_prompts_without_one() -> None:
    system, other = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be long."}
    for row, messages in (
        ({"prompt": "a"}, [system, {"role": "user", "content": "a"}]),
        ({"messages": [USER, ANSWER]}, [system, USER]),
        ({"messages": [other, USER, ANSWER]}, [other, USER]),
        ({"prompt": "a", "system": "Be long."}, [other, {"role": "user", "content": "a"}]),
    ):
        assert read_prompt(row, system_prompt="Be brief.").conversation.messages == messages


def test_texts_are_continued_with_bos_and_without_eos(tmp_path: Path) -> None:
    """By recipes and by the server, also if the tokenizer ends texts with an EOS token."""
    model = tokenizers.Tokenizer.from_file(str(write_family(tmp_path, "alpaca") / "tokenizer.json"))
    special = [(token, model.token_to_id(token)) for token in ("<s>", "</s>")]
    model.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    expected = [special[0][1], *tokenizer.encode("Hello")]
    data = PromptDataset("x", prompt_format="text")
    assert encode_document(data, tokenizer, {"prompt": "Hello"}).tokens.tolist() == expected
    request = parse_completion_request({"model": "m", "prompt": "Hello"})
    assert PromptMaker(tokenizer, 4096, None).make_prompts(request)[0].tokens == expected


@pytest.mark.parametrize("max_tokens", [None, 50])
@pytest.mark.parametrize("before", [0, 100])
def test_half_characters_are_refused_with_any_limit(qwen: Tokenizer, before: int, max_tokens: int | None) -> None:
    with pytest.raises(UserError, match="U\\+DC80"):
        qwen.copy_with(max_tokens=max_tokens).encode("a" * before + "\udc80")
