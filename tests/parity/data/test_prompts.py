"""All that answers rows starts from the tokens of transformers' generation prompt, whatever a template adds to it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.helpers.chat_families import FAMILIES, write_family
from tests.helpers.encode_rows import encode_document
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.prompt_data import PromptDataset
from tunekit.data.datasets import ChatDataset
from tunekit.data.sft_datasets import AutoDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.evaluation.evaluation_rows import Question, iter_questions, read_rows
from tunekit.recipes.generate import GenerateConfig
from tunekit.rollouts.prompts import encode_prompts, read_prompts
from tunekit.serving.prompts import PromptMaker
from tunekit.serving.request_fields import parse_chat_request
from tunekit.training.generation_monitor import find_prompts

NAMES = ("deepseek_r1", "deepseek_v3", "smollm3", "mistral", "llama3", "llama3_tools", "qwen3", "qwen2", "gpt_oss")
USER, MORE = {"role": "user", "content": "What is 3 plus 4?"}, {"role": "user", "content": "And 4 plus 4?"}
SYSTEM, ANSWER = {"role": "system", "content": "Be brief. /no_think"}, {"role": "assistant", "content": "It is 7."}
CALLS = [{"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"x": 3}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "7"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Of two.", "parameters": {"type": "object", "properties": {}}},
    }
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER, ANSWER],
    "system": [SYSTEM, USER, ANSWER],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "I count."}],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "7, I think."}, MORE, {**ANSWER, "content": "8"}],
    "result": [USER, CALL, RESULT, ANSWER],
    "call": [USER, CALL],
}
CASES = [
    (family, name)
    for family in NAMES
    for name in CONVERSATIONS
    # the calls of deepseek_r1 need a null, which `apply_chat_template` removes
    if name not in ("result", "call") or (FAMILIES[family].calls and family != "deepseek_r1")
]


def read_question(tokenizer: Tokenizer, source: Path, **options: Any) -> Question:
    """The question of recipe `evaluate`."""
    dataset = AutoDataset(str(source), num_proc=0, **options)
    loader = build_dataloader(dataset, tokenizer, 1, 1, DistributedContext.single_process())
    (question,) = iter_questions(read_rows(loader, tokenizer), tokenizer)
    return question


def read_generate(tokenizer: Tokenizer, source: Path) -> list[int]:
    config = GenerateConfig(model="m", source=str(source))
    (row,) = encode_prompts(config, read_prompts(config), tokenizer)
    return [*row.tokens]


def read_policy(tokenizer: Tokenizer, source: Path) -> list[int]:
    return encode_document(PromptDataset("x"), tokenizer, json.loads(source.read_text())).tokens.tolist()


def read_generation_eval(tokenizer: Tokenizer, source: Path) -> list[int]:
    dataset = ChatDataset(str(source), num_proc=0)
    loader = build_dataloader(dataset, tokenizer, 1, 1, DistributedContext.single_process())
    (prompt,) = find_prompts(loader, tokenizer)
    return prompt.tokens


def read_request(tokenizer: Tokenizer, source: Path) -> list[int]:
    row = json.loads(source.read_text())
    request = parse_chat_request({"model": "m", **row, "messages": row["messages"][:-1]})
    (prompt,) = PromptMaker(tokenizer, 4096, None).make_prompts(request)
    return [*prompt.tokens]


READERS: dict[str, Callable[[Tokenizer, Path], list[int]]] = {
    "generate and rejection sampling": read_generate,
    "grpo and ppo": read_policy,
    "evaluate": lambda tokenizer, source: read_question(tokenizer, source).prompt,
    "generation_eval": read_generation_eval,
    "serve": read_request,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Tokenizers of each family, ours and that of transformers."""
    paths = {name: write_family(tmp_path_factory.mktemp(name), name) for name in NAMES}
    return {name: (Tokenizer.open(path), AutoTokenizer.from_pretrained(path)) for name, path in paths.items()}


def write_row(path: Path, messages: list[dict[str, Any]]) -> Path:
    has_calls = CALL in messages
    path.write_text(json.dumps({"messages": messages, **({"tools": TOOLS} if has_calls else {})}))
    return path


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_prompts_are_generation_prompts(
    family: str, name: str, reader: str, tokenizers: dict[str, tuple[Tokenizer, Any]], tmp_path: Path
) -> None:
    (ours, theirs), messages = tokenizers[family], CONVERSATIONS[name]
    tools = TOOLS if CALL in messages else None
    expected = theirs.apply_chat_template(messages[:-1], tools, add_generation_prompt=True, return_dict=False)
    assert READERS[reader](ours, write_row(tmp_path / "rows.jsonl", messages)) == expected


@pytest.mark.parametrize("name", ["one turn", "system"])
@pytest.mark.parametrize("family", NAMES)
def test_expected_answers_are_what_follows_the_prompt(
    family: str, name: str, tokenizers: dict[str, tuple[Tokenizer, Any]], tmp_path: Path
) -> None:
    """Without what the prompt already starts: a header, a block of reasoning, an empty one with /no_think."""
    question = read_question(tokenizers[family][0], write_row(tmp_path / "rows.jsonl", CONVERSATIONS[name]))
    before = {"qwen3": "<think>\n\n</think>\n\n", "gpt_oss": "final"}.get(family, "")
    assert question.expected == before + ANSWER["content"]


def test_prompts_follow_the_variables_of_the_dataset(
    tokenizers: dict[str, tuple[Tokenizer, Any]], tmp_path: Path
) -> None:
    ours, theirs = tokenizers["qwen3"]
    source = write_row(tmp_path / "rows.jsonl", CONVERSATIONS["one turn"])
    question = read_question(ours, source, chat_template_kwargs={"enable_thinking": False})
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    assert question.prompt == theirs.apply_chat_template([USER], enable_thinking=False, **options)
    assert question.prompt != theirs.apply_chat_template([USER], **options)
    assert question.expected == ANSWER["content"]
