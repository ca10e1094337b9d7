"""`tune serve` with the official client of OpenAI."""

import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import transformers

from tests.helpers.servers import ServerProcess, write_random_adapter
from tests.helpers.wait import TIMEOUT_SECONDS, wait_until
from tunekit import assets
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.build import load_for_inference
from tunekit.cli import main as cli
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.generation.generate import generate_answers
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.token_probabilities import token_probabilities
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig

KEY = "secret-key"
MODEL = "tunekit/nano"
PROMPTS = ["What is 3 plus 4?", "A story about a fox, please.", "How many grams are 62 pounds?", "Hello!"]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FP32 = PrecisionConfig(compute_dtype="fp32")
ENDLESS: Any = {"temperature": 2, "max_tokens": 900, "extra_body": {"ignore_eos": True}}  # answers of 900 tokens
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_tides", "description": "Tides", "parameters": CITY}},
]


def user_message(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of different kinds. The second one has a chat template of its own."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = {
        "first": write_random_adapter(folder / "first", LoRAConfig(rank=4), 1),
        "second": write_random_adapter(folder / "second", DoRAConfig(rank=8, target_modules=("attn", "mlp")), 2),
    }
    for path in assets.MODELS[MODEL].glob("*token*.json"):
        shutil.copy(path, paths["second"])
    template = (assets.MODELS[MODEL] / "chat_template.jinja").read_text()
    (paths["second"] / "chat_template.jinja").write_text("{{- 'Questions:' -}}" + template)
    return paths


@pytest.fixture(scope="module")
def server(adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    flags = [word for name, path in adapters.items() for word in ("--adapter", f"{name}={path}")]
    limits = (
        "--dtype",
        "fp32",
        "--max-num-seqs",
        "4",
        "--max-concurrent-requests",
        "24",
        "--max-request-bytes",
        "100000",
    )
    process = ServerProcess(*flags, *limits, TUNEKIT_API_KEY=KEY)
    yield process
    process.end()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def nano() -> tuple[Decoder, Tokenizer]:
    return load_for_inference(MODEL, FP32, DistributedContext())


def chat(client: openai.OpenAI, text: str = PROMPTS[0], **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": user_message(text), "temperature": 0} | options
    )


def expected_answers(path: str, prompts: list[str], max_new_tokens: int) -> list[str]:
    model, tokenizer = load_for_inference(path, FP32, DistributedContext())
    encoded = [encode_conversation(tokenizer, user_message(text)) for text in prompts]
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    return [text for text, _ in generate_answers(model, tokenizer, encoded, sampling, 4, DistributedContext())]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "first", "second"]
    assert client.models.retrieve("second").id == "second"


def test_greedy_answers_equal_tune_run_generate(client: openai.OpenAI, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    overrides = [f"prompts={json.dumps(PROMPTS)}", "sampling.max_new_tokens=48", f"output_path={output}"]
    overrides += ["device=cpu", "precision.compute_dtype=fp32"]
    assert cli.main(["run", "generate", "nano/generate", *overrides]) == 0
    expected = [json.loads(line)["answer"] for line in output.read_text().splitlines()]
    answers = [chat(client, text, max_completion_tokens=48) for text in PROMPTS]
    assert [answer.choices[0].message.content for answer in answers] == expected
    reasons = {answer.choices[0].finish_reason for answer in answers}
    assert reasons <= {"stop", "length"} and answers[0].usage.total_tokens == (
        answers[0].usage.prompt_tokens + answers[0].usage.completion_tokens
    )


def test_adapters_answer_as_when_served_alone(client: openai.OpenAI, adapters: dict[str, Path]) -> None:
    expected = {name: expected_answers(str(path), PROMPTS, 24) for name, path in adapters.items()}
    expected[MODEL] = expected_answers(MODEL, PROMPTS, 24)
    assert len({tuple(answers) for answers in expected.values()}) == 3
    pairs = [(name, index) for index in range(len(PROMPTS)) for name in expected]  # all adapters at once
    answers: dict[tuple[str, int], str] = {}

    def run(name: str, index: int) -> None:
        response = chat(client, PROMPTS[index], model=name, max_tokens=24)
        answers[name, index] = response.choices[0].message.content

    threads = [threading.Thread(target=run, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    usages = [chat(client, PROMPTS[0], model=name, max_tokens=1).usage.prompt_tokens for name in expected]
    assert usages[0] == usages[2] < usages[1]
    assert answers == {(name, index): expected[name][index] for name, index in pairs}


@pytest.mark.parametrize("text", PROMPTS)
def test_stream_equals_complete_answer(client: openai.OpenAI, text: str) -> None:
    full = chat(client, text, max_tokens=32)
    chunks = list(chat(client, text, max_tokens=32, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant" and len(chunks) > 4
    assert "".join(delta.content or "" for delta in deltas) == full.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == full.choices[0].finish_reason
    assert chunks[-1].usage == full.usage


def test_choices_and_seeds(client: openai.OpenAI) -> None:
    options: Any = {"temperature": 1, "n": 3, "max_tokens": 12, "seed": 7}
    first, second = (chat(client, PROMPTS[1], **options) for _ in range(2))
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, second)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    other = chat(client, PROMPTS[1], **options | {"seed": 8})
    assert [choice.message.content for choice in other.choices] != texts[0]
    streamed = {index: "" for index in range(3)}
    for chunk in chat(client, PROMPTS[1], **options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [*streamed.values()] == texts[0]


def test_logprobs_equal_token_probabilities(client: openai.OpenAI, nano: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = nano
    options: Any = {"temperature": 0.5, "seed": 1, "max_tokens": 20, "logprobs": True, "top_logprobs": 5}
    answer = chat(client, PROMPTS[1], **options)
    items = answer.choices[0].logprobs.content
    assert "".join(item.token for item in items) == answer.choices[0].message.content
    prompt = encode_conversation(tokenizer, user_message(PROMPTS[1]))
    tokens = tokenizer.encode(answer.choices[0].message.content)
    assert [tokenizer.decode([token]) for token in tokens] == [item.token for item in items]
    for item, expected in zip(items, token_probabilities(model, prompt, tokens), strict=True):
        assert item.logprob == pytest.approx(math.log(expected.probability), abs=1e-4)
        top = {entry.token: entry.logprob for entry in item.top_logprobs}
        for token, probability in expected.alternatives[:3]:
            assert top[tokenizer.decode([token])] == pytest.approx(math.log(probability), abs=1e-4)
    chunks = chat(
        client, PROMPTS[1], temperature=0.5, seed=1, max_tokens=20, logprobs=True, top_logprobs=5, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry for part in parts if part for entry in part.content] == items


def test_completions(client: openai.OpenAI, nano: tuple[Decoder, Tokenizer]) -> None:
    tokens = nano[1].encode("The fox and the", special=True)
    options: Any = {"model": MODEL, "temperature": 0, "max_tokens": 10}
    text, both = "The fox and the", [["The fox and the", "One day"], tokens]
    alone = client.completions.create(prompt=text, logprobs=2, **options)
    pair, ids = (client.completions.create(prompt=prompt, **options) for prompt in both)
    assert alone.choices[0].text == pair.choices[0].text == ids.choices[0].text != pair.choices[1].text
    logprobs = alone.choices[0].logprobs
    assert "".join(logprobs.tokens) == alone.choices[0].text and len(logprobs.top_logprobs[0]) == 2
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    stream = client.completions.create(prompt=text, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in stream) == alone.choices[0].text


def test_stop_strings(client: openai.OpenAI) -> None:
    full = chat(client, PROMPTS[1], max_tokens=40).choices[0].message.content
    stop = full[10:14]
    answer = chat(client, PROMPTS[1], max_tokens=40, stop=[stop, "@@"]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (full[: full.index(stop)], "stop")
    chunks = [chunk.choices[0] for chunk in chat(client, PROMPTS[1], max_tokens=40, stop=stop, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == answer.message.content
    assert chunks[-1].finish_reason == "stop"


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_tool_calls(client: openai.OpenAI) -> None:
    """The schema makes the model write a call as its template does, which the server must recognize."""
    closed = {"type": "object", "additionalProperties": False}
    city = {**closed, "properties": {"city": {"const": "Quito"}}, "required": ["city"]}
    properties = {"name": {"const": "get_weather"}, "arguments": city}
    fmt = json_schema({**closed, "properties": properties, "required": ["name", "arguments"]})
    options: Any = {"tools": TOOLS, "max_tokens": 150, "response_format": fmt}
    answer = chat(client, "What is the weather in Quito?", **options).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    [call] = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Quito"})
    chunks = [item.choices[0] for item in chat(client, "What is the weather in Quito?", stream=True, **options)]
    assert not any(chunk.delta.content for chunk in chunks) and chunks[-1].finish_reason == "tool_calls"
    assert chunks[-1].delta.tool_calls[0].function.model_dump() == call.function.model_dump()
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
    messages = [*user_message("What is the weather in Quito?"), answer.message.model_dump(exclude_none=True), result]
    assert chat(client, messages=messages, tools=TOOLS, max_tokens=8).usage.prompt_tokens > 50
    assert chat(client, **options, tool_choice="none").choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_tides"}}])
def test_required_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(2):
        answer = chat(
            client, "Hello!", tools=TOOLS, tool_choice=choice, temperature=1.5, seed=seed, max_tokens=200
        ).choices[0]
        if answer.finish_reason == "length":  # in the text of the city
            assert set(re.findall(r'"(\w+)": *"', answer.message.content)) <= {"name", "city"}
            continue
        [call] = answer.message.tool_calls
        assert call.function.name in (("get_weather", "get_tides") if choice == "required" else ("get_tides",))
        jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_json_schema_answers(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["fox", "crow"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["kind", "age"],
        "additionalProperties": False,
    }
    fmt = json_schema(schema)
    for seed in range(2):
        answer = chat(client, PROMPTS[1], temperature=2, seed=seed, max_tokens=60, response_format=fmt).choices[0]
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content), schema)
    loose = chat(client, PROMPTS[1], max_tokens=300, response_format={"type": "json_object"}).choices[0]
    assert loose.message.content.startswith("{")


def test_structured_outputs_of_vllm(client: openai.OpenAI) -> None:
    """The fields of vLLM, and OpenAI's, constrain answers in the same way."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip

    def answer(**fields: Any) -> str:
        return chat(client, PROMPTS[1], temperature=2, seed=3, max_tokens=40, **fields).choices[0].message.content

    fields: list[Any] = [{"guided_json": schema}, {"guided_json": json.dumps(schema)},
                         {"structured_outputs": {"json": schema}}]  # fmt: skip
    expected = answer(response_format=json_schema(schema))
    assert [answer(extra_body=field) for field in fields] == [expected] * 3
    jsonschema.validate(json.loads(expected), schema)
    words = ["a.b (c)", "d|e"]
    for field in ({"guided_choice": words}, {"structured_outputs": {"choice": words}}):
        assert answer(extra_body=field) in words
    for field in ({"guided_regex": "[0-9]{3}-[a-c]"}, {"structured_outputs": {"regex": "[0-9]{3}-[a-c]"}}):
        assert re.fullmatch("[0-9]{3}-[a-c]", answer(extra_body=field))
    completion = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=20, temperature=2, extra_body={"guided_choice": words}
    )
    assert completion.choices[0].text in words


def test_variables_of_the_chat_template() -> None:
    """`chat_template_kwargs`, as in vLLM: the prompt is that of transformers with these variables."""
    template = "{{ bos_token }}{% if loud %}SHOUT {% endif %}{{ messages[0].content }}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "template.jinja"
        path.write_text(template)
        server = ServerProcess("--chat-template", str(path))
        try:
            with openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=TIMEOUT_SECONDS
            ) as client:
                tokenizer = transformers.AutoTokenizer.from_pretrained(assets.MODELS[MODEL])
                for kwargs in ({}, {"loud": True}, {"loud": False}, {"loud": True}):
                    usage = chat(client, max_tokens=1, extra_body={"chat_template_kwargs": kwargs}).usage
                    ids = tokenizer.apply_chat_template(
                        user_message(PROMPTS[0]), chat_template=template, return_dict=False, **kwargs
                    )
                    assert usage.prompt_tokens == len(ids)
        finally:
            server.end()


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"extra_body": {"repetition_penalty": 1e308}}, "repetition_penalty"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"extra_body": {"unknown_field": 1}}, "unknown_field"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ({"extra_body": {"chat_template_kwargs": 1}}, "chat_template_kwargs"),
    ({"extra_body": {"guided_json": "{"}}, "guided_json"),
    ({"extra_body": {"guided_json": {"type": "foo"}}}, "guided_json"),
    ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
    ({"extra_body": {"guided_choice": []}}, "guided_choice"),
    ({"extra_body": {"guided_json": "[" * 50_000}}, "guided_json"),
    ({"extra_body": {"structured_outputs": {"json": 0}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"json_object": True, "json": {}}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"grammar": "x"}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"regex": "x", "choice": ["x"]}}}, "structured_outputs"),
    ({"extra_body": {"guided_choice": ["x"]}, "response_format": {"type": "json_object"}}, "guided_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}},
     "response_format"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "param"), BAD_REQUESTS, ids=[param for _, param in BAD_REQUESTS])
def test_invalid_requests_name_the_field(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **options)
    assert error.value.param == param


def test_unusual_requests_are_answered(client: openai.OpenAI) -> None:
    developer = [{"role": "developer", "content": "Be brief."}, *user_message("Hello!")]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    unusual: list[dict[str, Any]] = [
        {"messages": developer},
        {"messages": parts},
        {"messages": user_message("")},
        {"messages": user_message("<|turn|><|assistant|>")},
        {"temperature": 1e-300, "seed": -5, "top_p": 1e-9},
        {"temperature": 2, "n": 20, "extra_body": {"top_k": 10**9, "min_p": 1}},
        {"stop": ["x" * 10_000]},
    ]
    for options in unusual:
        assert chat(client, max_tokens=3, **options).choices[0].finish_reason in ("stop", "length")


def test_errors_do_not_show_paths_of_the_server(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, messages=[*user_message("Hello!"), {"role": "system", "content": "Be brief."}])
    assert "chat template fails" in error.value.message and "/" not in error.value.message


def test_context_overflow_names_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, "fox " * 2000)
    assert error.value.code == "context_length_exceeded" and "1024" in error.value.message
    for field in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError) as error:
            chat(client, **{field: 2000})
        assert f"12 tokens and {field}=2000" in error.value.message


def test_wrong_keys_models_and_paths(server: ServerProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(client.with_options(api_key="wrong"))
    with pytest.raises(openai.NotFoundError) as error:
        chat(client, model="gpt-5")
    assert error.value.code == "model_not_found" and MODEL in error.value.message
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{server.url}/v1/chat/completions"
    assert httpx.get(url, headers=headers).status_code == 405
    assert httpx.get(f"{server.url}/v1/nothing", headers=headers).json()["error"]["message"]
    adapter = {"lora_name": "x", "lora_path": "/"}  # --allow-runtime-lora-updating is not set
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", headers=headers, json=adapter).status_code == 404
    assert httpx.post(url, headers=headers, content=b"{").status_code == 400
    assert httpx.post(url, headers=headers, content=b"[]").status_code == 400
    assert httpx.post(url, headers=headers, content=b" " * 100_001).status_code == 413
    assert httpx.post(url, content=b"{").status_code == 401
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_too_many_answers(client: openai.OpenAI) -> None:
    """The limit counts answers: of the requests with 8 answers, three run at once."""
    streams, refused = [], []
    try:
        for _ in range(5):
            try:
                streams.append(chat(client, PROMPTS[1], stream=True, n=8, **ENDLESS))
            except openai.RateLimitError as error:
                refused.append(error)
    finally:
        for stream in streams:
            stream.close()
    assert len(streams) == 3 and len(refused) == 2
    assert all(float(error.response.headers["retry-after"]) > 0 for error in refused)
    retrying = client.with_options(max_retries=20)  # the client waits until the answers that left are not counted
    with pytest.raises(openai.BadRequestError) as problem:
        chat(retrying, n=25)
    assert problem.value.param == "n"
    assert len(chat(retrying, n=24, max_tokens=1).choices) == 24


def test_disconnected_clients_free_their_rows(client: openai.OpenAI) -> None:
    """The four rows are occupied by clients that leave. Their 28 answers would take more than 6,000 steps."""
    for _ in range(3):
        streams = [chat(client, PROMPTS[1], stream=True, **ENDLESS) for _ in range(4)]
        for stream in streams:
            next(iter(stream))
            stream.close()
    short = client.with_options(timeout=0.5)
    for _ in range(4):
        with pytest.raises(openai.APITimeoutError):
            chat(short, PROMPTS[1], n=4, **ENDLESS)
    start = time.monotonic()
    assert chat(client, max_tokens=4).choices[0].message.content
    end = time.monotonic()
    chat(client, PROMPTS[1], max_tokens=50, extra_body={"ignore_eos": True})
    assert end - start < 20 * (time.monotonic() - end), "as long as 1,000 steps"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_finish_running_requests(number: signal.Signals) -> None:
    """Until then, /health and new requests get status 503 on new connections too."""
    server = ServerProcess()
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=TIMEOUT_SECONDS)
        stream = chat(client, PROMPTS[1], stream=True, **ENDLESS)  # the answer takes seconds
        chunks = [next(stream)]
        server.signal(number)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert httpx.get(f"{server.url}/health").json() == {"status": "shutting down"}
        with pytest.raises(openai.InternalServerError) as refused:
            chat(client.with_options(max_retries=0))
        assert refused.value.status_code == 503
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) > 10
        client.close()
        assert server.wait() == 0
        assert "Traceback" not in server.log
    finally:
        server.end()


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--adapter", "x"], "NAME=PATH"),
        (["--adapter", "a=nowhere/at-all"], "nowhere/at-all"),
        (["--adapter", f"{MODEL}=x"], "same"),
        (["--adapter", "a=tunekit/nano"], "is not an adapter"),
        (["--max-model-len", "5000"], "1024"),
        (["--quantization", "nf5"], "nf4"),
        (["--dtype", "fp8"], "--dtype: "),
        (["--port", "99999"], "99999"),
    ],
)
def test_mistakes_are_errors(args: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", MODEL, "--port", "0", *args]) == 2
    error = capsys.readouterr().err
    assert problem in error or "two models" in error


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert cli.main(["serve", MODEL, "--port", str(other.getsockname()[1])]) == 2
    assert "Set another --host or --port" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "chat"])
def test_missing_model_is_reported_before_torch_is_imported(verb: str) -> None:
    run = f"main(['{verb}', 'runs/nope'])"
    code = f"import sys; from tunekit.cli.main import main; sys.exit({run} + ('torch' in sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 2, process.stderr
    assert process.stderr.startswith("error: runs/nope: directory not found") and process.stderr.count("\n") == 1
