"""Tool calls that chat templates write are parsed back, and results are appended as the templates render them."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.call_templates import CALLS, open_call_family
from tests.helpers.chat_families import AMBIGUOUS, FAMILIES, write_family
from tests.helpers.marked_templates import MARKED, open_marked
from tunekit.build import resolve_model
from tunekit.data.chat_template.call_detection import detect_format, render_calls
from tunekit.data.chat_template.template_features import try_render
from tunekit.data.chat_template.template_rewrites import find_rewrites
from tunekit.data.chat_template.tool_calls import ToolCallParser, tool_result_tokens
from tunekit.data.tokenizer import Tokenizer
from tunekit.hub import download

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "range": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "-", "parameters": {"properties": PROPERTIES}},
    }
    for name in ("weather", "get_tides")
]
ARGUMENTS = (
    {"city": 'Tromsø, "north"\n x', "days": 3, "exact": True, "tags": ["a", "b}"], "range": {"low": -1.5}},
    {"city": "12"},  # text that looks like a number
)
WRITES_CALLS = ("llama3_tools", "llama3_builtin", "mistral", "qwen2", "qwen3", "deepseek_r1", "glm4", "gpt_oss")
ONE_CALL = ("llama3_tools", "llama3_builtin", "gpt_oss")  # these templates write one call in an answer
MARKED_ONLY = tuple(name for name in MARKED if name not in FAMILIES)
CALLING = (*WRITES_CALLS, *CALLS, *(name for name in MARKED_ONLY if MARKED[name].has_calls), "nano")
NAMES = (*FAMILIES, *AMBIGUOUS, *CALLS, *MARKED_ONLY, "nano")
RESULT = {"role": "tool", "content": "7 degrees", "tool_call_id": "call00000", "name": "weather"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    def open_one(name: str, directory: Path) -> Tokenizer:
        if name == "nano":
            return resolve_model("tunekit/nano", download.SMALL, {})[2]
        if name in MARKED_ONLY:
            return open_marked(directory, name)
        return open_call_family(directory, name) if name in CALLS else Tokenizer.open(write_family(directory, name))

    return {name: open_one(name, tmp_path_factory.mktemp(name)) for name in NAMES}


def make_calls(arguments: tuple[dict[str, Any], ...], name: str = "") -> list[dict[str, Any]]:
    calls = zip(("weather", "get_tides"), arguments, strict=False)
    return [
        {
            "type": "function",
            "id": f"functions.{tool}:{index}" if name.startswith("kimi") else f"call0000{index}",
            "function": {"name": tool, "arguments": values},
        }
        for index, (tool, values) in enumerate(calls)
    ]


def functions(calls: Any) -> list[dict[str, Any]]:
    return [call["function"] for call in calls]


def test_which_templates_write_calls(tokenizers: dict[str, Tokenizer]) -> None:
    names = {name for name, tokenizer in tokenizers.items() if detect_format(tokenizer, TOOLS)}
    assert names == {*CALLING} - {"kimi_k2", "kimi_k2_thinking"}  # which write ids of calls, not names


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", CALLING)
def test_written_calls_are_parsed(name: str, count: int, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    calls = make_calls(ARGUMENTS[:count], name)
    text = render_calls(tokenizer, TOOLS, calls)
    expected = functions(calls[:1] if name in ONE_CALL else calls)
    if not text:
        pytest.skip("the template writes one call in an answer")
    for answer in (text, tokenizer.encode(text)):
        parsed = ToolCallParser(tokenizer, TOOLS).parse(answer)
        assert (parsed.error, parsed.content, functions(parsed.tool_calls)) == (None, "", expected)


@pytest.mark.parametrize("arguments", [{}, {"city": ""}, {"days": 0}, {"tags": []}])
@pytest.mark.parametrize("name", CALLING)
def test_arguments_may_be_empty(name: str, arguments: dict[str, Any], tokenizers: dict[str, Tokenizer]) -> None:
    calls = make_calls((arguments,), name)
    parsed = ToolCallParser(tokenizers[name], TOOLS).parse(render_calls(tokenizers[name], TOOLS, calls))
    assert functions(parsed.tool_calls) == functions(calls)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_coder", "glm45", "nano"])
def test_content_before_calls_is_kept(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    messages = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "content": "I look it up.", "tool_calls": make_calls(ARGUMENTS)}
    text = try_render(tokenizers[name], [*messages, answer], TOOLS)
    parsed = ToolCallParser(tokenizers[name], TOOLS).parse(text[text.index("I look") :])
    assert parsed.message == {**answer, "tool_calls": list(parsed.tool_calls)}
    assert functions(parsed.tool_calls) == functions(make_calls(ARGUMENTS))


def test_reasoning_is_separated(tokenizers: dict[str, Tokenizer]) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>'
    parser = ToolCallParser(tokenizers["qwen3"], TOOLS)
    parsed = parser.parse(f"<think>\nWhich tool?\n</think>\n\nLet me see.\n{call}")
    assert (parsed.reasoning_content, parsed.content, len(parsed.tool_calls)) == ("Which tool?", "Let me see.", 1)
    assert parser.parse("<think>\n\n</think>\n\nHello") == ("Hello", None, (), None)
    assert parser.parse("<think>\nStill thinking <tool_call>")[:2] == ("", "Still thinking <tool_call>")
    prompted = ToolCallParser(tokenizers["deepseek_r1"], TOOLS)  # the generation prompt contains <think>
    assert prompted.parse("Hm.\n</think>\n\nYes<｜end▁of▁sentence｜>")[:2] == ("Yes", "Hm.")
    assert prompted.parse("Hm.")[:2] == ("", "Hm.")


def test_whitespace_in_calls_may_vary(tokenizers: dict[str, Tokenizer]) -> None:
    texts = {
        "qwen3_coder": "<tool_call><function=weather> <parameter=city>Oslo</parameter></function></tool_call>Done.",
        "glm45": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>Done.",
        "qwen2": '<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>Done.',
    }
    for name, text in texts.items():
        parsed = ToolCallParser(tokenizers[name], TOOLS).parse(text)
        assert functions(parsed.tool_calls) == [{"name": "weather", "arguments": {"city": "Oslo"}}], name
        assert parsed.content == "Done."


def test_harmony_channels(tokenizers: dict[str, Tokenizer]) -> None:
    parser = ToolCallParser(tokenizers["gpt_oss"], TOOLS)
    text = (
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Oslo"}<|call|>'
    )
    parsed = parser.parse(text)
    assert (parsed.content, parsed.reasoning_content, parsed.error) == ("One moment.", "Need the weather.", None)
    assert functions(parsed.tool_calls) == [{"name": "weather", "arguments": {"city": "Oslo"}}]
    assert parser.parse("<|channel|>final<|message|>Cold.<|return|>") == ("Cold.", None, [], None)


def test_llama_python_tag(tokenizers: dict[str, Tokenizer]) -> None:
    parser = ToolCallParser(tokenizers["llama3_builtin"], TOOLS)
    builtin = parser.parse('<|python_tag|>brave_search.call(query="Oslo (Norway)")<|eom_id|>')
    assert functions(builtin.tool_calls) == [{"name": "brave_search", "arguments": {"query": "Oslo (Norway)"}}]
    custom = parser.parse('<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}<|eom_id|>')
    assert functions(custom.tool_calls) == [{"name": "weather", "arguments": {"city": "Oslo"}}]


def test_gemma_arguments(tokenizers: dict[str, Tokenizer]) -> None:
    text = '<|tool_call>call:weather{"city":"Oslo", days : 3,\n tags:[<|"|>a,{}"b<|"|>,<|"|><|"|>],range:{low:-1.5}}'
    parsed = ToolCallParser(tokenizers["gemma4"], TOOLS).parse(f"<|channel>thought\nHm.<channel|>{text}<tool_call|>")
    arguments = {"city": "Oslo", "days": 3, "tags": ['a,{}"b', ""], "range": {"low": -1.5}}
    assert functions(parsed.tool_calls) == [{"name": "weather", "arguments": arguments}]
    assert (parsed.content, parsed.reasoning_content) == ("", "Hm.")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}\n</tool_call>'),
        ("qwen2", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
        ("qwen2", '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>'),
        ("qwen2", '<tool_call>\n{"name": "weather", "arguments": {"x": NaN}}\n</tool_call>'),
        ("qwen2", "<tool_call>\n</tool_call>"),
        ("qwen2", "<tool_call>" + "[" * 100_000),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n"),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo"),
        ("mistral_v13", '[TOOL_CALLS]weather[ARGS]{"city": '),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>"),
        ("gpt_oss", "<|channel|>commentary to=functions.weather<|message|>{city<|call|>"),
        ("llama4_python", "[weather(open('x'))]"),
        ("llama3_tools", '{"name": "weather", "parameters": {"city": "Oslo"'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Oslo}<tool_call|>'),
        ("gemma4", "<|tool_call>call:weather{city:1 <tool_call|>"),
        ("gemma4", "<|tool_call>call:weather{x:" + "[" * 1000),
    ],
)
def test_malformed_calls_are_described(name: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    parsed = ToolCallParser(tokenizers[name], TOOLS).parse(text)
    assert parsed.error and parsed.error.startswith("Invalid tool call: ") and not parsed.tool_calls
    assert "\n" not in parsed.error and parsed.content


@pytest.mark.parametrize("text", ['{"name": "Ada", "age": 36}', '{"city": "Oslo"}', "[1, 2]", "weather\nis fine", ""])
@pytest.mark.parametrize(
    "name", ["llama3_tools", "nano", "glm4", "llama4", "llama4_python", "chatml", "qwen2", "gemma4"]
)
def test_answers_without_calls_are_content(name: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    assert ToolCallParser(tokenizers[name], TOOLS).parse(text) == (text, None, (), None)


def test_without_tools_nothing_is_a_call(tokenizers: dict[str, Tokenizer]) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert ToolCallParser(tokenizers["qwen2"], None).parse(text) == (text, None, (), None)


def test_models_without_a_call_template_use_known_formats(tokenizers: dict[str, Tokenizer]) -> None:
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    texts = [f"<tool_call>{json.dumps(call)}</tool_call>", f"<|tool_call|>[{json.dumps(call)}]", json.dumps(call)]
    for text in texts:
        assert functions(ToolCallParser(tokenizers["granite"], TOOLS).parse(text).tool_calls) == [call]


@pytest.mark.parametrize("name", CALLING)
def test_damaged_answers_never_raise(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    rng = random.Random(0)
    text = render_calls(tokenizers[name], TOOLS, make_calls(ARGUMENTS, name)) or render_calls(
        tokenizers[name], TOOLS, make_calls(ARGUMENTS[:1], name)
    )
    parser = ToolCallParser(tokenizers[name], TOOLS)
    for _ in range(60):
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        damaged = text[:start] + rng.choice(["", text[end : end + 9], '"', "{", "]"]) + text[end:]
        parsed = parser.parse(damaged)
        assert not (parsed.error and parsed.tool_calls)
        parser.streamable(damaged)


@pytest.mark.parametrize(
    "name", ["nano", "llama3_tools", "llama4_python", "glm4", "gpt_oss", "qwen3_coder", "granite", "gemma4"]
)
def test_hostile_answers_take_no_time(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    parser = ToolCallParser(tokenizers[name], TOOLS)
    units = (
        "\n",
        " ",
        "\n[",
        "[{",
        "(",
        "-",
        "1+",
        '{"a":',
        "<tool_call>",
        "<|tool_call>call:a{",
        "[weather(x=",
        "weather\n{",
        "<|channel|>",
    )
    started = time.thread_time()
    for unit in units:
        for start in ("", "[weather(x=", "<tool_call>", '{"name": "weather", "arguments": '):
            text = start + unit * (20_000 // len(unit))
            assert not parser.parse(text).tool_calls
            parser.streamable(text)
    assert time.thread_time() - started < 10


@pytest.mark.parametrize("name", [*CALLING, "chatml"])
def test_streamed_parts_are_prefixes_of_the_answer(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    parser = ToolCallParser(tokenizers[name], TOOLS)
    calls = render_calls(tokenizers[name], TOOLS, make_calls(ARGUMENTS[:1], name))
    for text in (calls, "Just an answer.\n\nIn two parts.", "Hi.\n" + calls):
        if name == "gpt_oss" and not text.startswith(" to="):
            text = f"<|channel|>final<|message|>{text}<|return|>"  # noqa: PLW2901
        final = parser.parse(text)
        ids = tokenizers[name].encode(text)
        for end in range(len(ids)):
            part = parser.streamable(tokenizers[name].decode(ids[:end], special=True).rstrip("\ufffd"))
            assert final.content.startswith(part.content)


# What the rendering of a whole conversation appends after the answer. Templates that rewrite the answer are compared
# from its end-of-turn token on.
@pytest.mark.parametrize("kind", ["tool", "user"])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_appended_as_rendered(name: str, kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    calls = make_calls(ARGUMENTS[1:], name)
    following = [RESULT | {"tool_call_id": calls[0]["id"]}] if kind == "tool" else [{"role": "user", "content": "Now?"}]
    writes_calls = kind == "tool" and detect_format(tokenizer, TOOLS) is not None
    answer = {"role": "assistant", **({"content": "", "tool_calls": calls} if writes_calls else {"content": "Cold"})}
    ids = tool_result_tokens(tokenizer, TOOLS, following, calls if writes_calls else (), None)
    conversation = [{"role": "user", "content": "How cold?"}, answer, *following]
    text = try_render(tokenizer, conversation, TOOLS, prompt=True)
    if following[0]["content"] in text and name != "deepseek_v3":  # which writes tool results as answers
        assert tokenizer.encode(text)[-len(ids) :] == ids
    assert "7 degrees" in tokenizer.decode(ids) if kind == "tool" else "Now?" in tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens_and_results_are_the_rendered_conversation(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Prompt + sampled answer + appended tokens equals the rendering of everything if the template rewrites nothing."""
    tokenizer = tokenizers[name]
    if set(find_rewrites(tokenizer, TOOLS)) - {"whitespace", "end"}:
        pytest.skip("the template rewrites earlier turns")
    messages = [{"role": "user", "content": "How cold?"}]
    answer, question = {"role": "assistant", "content": "Cold"}, {"role": "user", "content": "Now?"}
    prompt = try_render(tokenizer, messages, TOOLS, prompt=True)
    text = try_render(tokenizer, [*messages, answer, question], TOOLS, prompt=True)
    end = text.index("Cold") + len("Cold")
    stop_text = tokenizer.stop_texts.search(text[: text.index("Now?")], end)
    body = text[len(prompt) : stop_text.start() if stop_text else end]
    rest = tool_result_tokens(tokenizer, TOOLS, [question])
    assert [*tokenizer.encode(prompt + body), *rest] == tokenizer.encode(text)
    stop = rest[0] if rest[0] in tokenizer.stops else None
    if stop is not None:
        assert tool_result_tokens(tokenizer, TOOLS, [question], (), stop) == rest[1:]


def test_several_results(tokenizers: dict[str, Tokenizer]) -> None:
    calls = make_calls(ARGUMENTS)
    results = [{"role": "tool", "content": text} for text in ("7", "high")]
    tokenizer = tokenizers["qwen2"]
    text = tokenizer.decode(tool_result_tokens(tokenizer, TOOLS, results, calls, tokenizer.eos), special=True)
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\nhigh\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_rewrites_are_named(tokenizers: dict[str, Tokenizer]) -> None:
    rewrites = {name: find_rewrites(tokenizers[name], TOOLS) for name in FAMILIES}
    assert {name: kinds for name, kinds in rewrites.items() if kinds} == {
        "llama2": ["whitespace"],
        "llama3": ["whitespace"],
        "llama3_tools": ["whitespace"],
        "llama3_builtin": ["whitespace"],
        "mistral": ["tools"],
        "gemma2": ["whitespace"],
        "gemma3": ["whitespace"],
        "qwen3": ["reasoning"],
        "deepseek_r1": ["prompt"],
        "deepseek_v3": ["prompt"],
        "gpt_oss": ["reasoning", "end"],
        "command_r": ["whitespace"],
    }
    assert not find_rewrites(tokenizers["mistral"]) and find_rewrites(tokenizers["mistral"], TOOLS)


def describe_template(tokenizer: Tokenizer) -> str:
    """Cells of the table in docs/tool-calls.md."""
    calls = [{**call, "id": f"call0000{index}"} for index, call in enumerate(make_calls(({}, {})))]
    single, pair = (render_calls(tokenizer, TOOLS, calls[:count]) for count in (1, 2))
    writes = [
        all(call["function"]["name"] in text for call in calls[:count]) for count, text in ((1, single), (2, pair))
    ]
    appended = tokenizer.decode(tool_result_tokens(tokenizer, TOOLS, [RESULT], calls[:1]), special=True)
    question = {"role": "user", "content": RESULT["content"]}
    as_user = tokenizer.decode(tool_result_tokens(tokenizer, TOOLS, [question]), special=True)
    kind = "one in an answer" if writes[0] else "no"
    rewrites = ", ".join(find_rewrites(tokenizer, TOOLS))
    result = "user message" if appended == as_user else "own turn"
    return f"{'yes' if all(writes) else kind} | {result} | {rewrites or 'none'}"


def test_documented_table_is_current(tokenizers: dict[str, Tokenizer]) -> None:
    """The rows of the table in the docs are those of the templates."""
    names = [*FAMILIES, *AMBIGUOUS, "nano"]
    rows = [f"| `{name}` | {describe_template(tokenizers[name])} |" for name in sorted(names)]
    page = (Path(__file__).parents[3] / "docs/tool-calls.md").read_text("utf-8")
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows
