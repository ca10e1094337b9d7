"""Requests of several adapters in one engine: nothing is lost, and no adapter waits for a stream of others."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.helpers.servers import write_random_adapter
from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest, TokenOutput
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.serving.adapter_set import AdapterSet
from tunekit.serving.engine_thread import EngineThread, Output, QueuedRequest
from tunekit.serving.errors import APIError


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterSet:
    path: Path = write_random_adapter(tmp_path_factory.mktemp("a") / "a", LoRAConfig(rank=2), 0)
    model = build.load_for_inference("tunekit/nano", PrecisionConfig(compute_dtype="fp32"), DistributedContext())[0]
    adapters = AdapterSet(model, HFCheckpoint.open(assets.MODELS["tunekit/nano"], "tunekit/nano"))
    adapters.load("a", str(path))
    return adapters


def make_engine(adapters: AdapterSet, max_num_seqs: int = 2) -> GenerationEngine:
    return GenerationEngine(adapters.model, max_num_seqs, 64, DistributedContext(), "raw_logprobs")


def make_request(name: str, adapter: str | None, outputs: "asyncio.Queue[Output]", tokens: int = 4) -> QueuedRequest:
    return QueuedRequest(GenerationRequest(name, [5, 6, 7], SamplingConfig(max_new_tokens=tokens)), adapter, outputs)


async def finish(outputs: "asyncio.Queue[Output]", count: int) -> list[str]:
    """Names of the requests in the order in which they end."""
    names = []
    while len(names) < count:
        output = await outputs.get()
        assert isinstance(output, TokenOutput)
        names += [output.request_id] if output.finish_reason else []
    return names


def test_each_adapter_has_its_turn(adapters: AdapterSet) -> None:
    async def run() -> list[str]:
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        thread = EngineThread(make_engine(adapters), adapters)
        thread.submit([make_request(f"{kind}{i}", kind, outputs) for i in range(4) for kind in (None, "a")])
        names = await finish(outputs, 1)
        thread.submit([make_request(f"late{i}", None, outputs) for i in range(4)])
        names += await finish(outputs, 11)
        thread.stop()
        return names

    names = asyncio.run(run())
    assert len(set(names)) == 12
    assert all(name.startswith("None") for name in names[:4])  # one switch for all that waited
    assert all(name.startswith("a") for name in names[4:8]) and all(name.startswith("late") for name in names[8:])


def test_adapters_are_unloaded_when_their_requests_are_answered(adapters: AdapterSet, tmp_path: Path) -> None:
    path = write_random_adapter(tmp_path / "b", LoRAConfig(rank=2), 1)

    async def run() -> tuple[list[str], Output]:
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        thread = EngineThread(make_engine(adapters), adapters)
        thread.submit([make_request("first", "a", outputs, tokens=30)])
        await outputs.get()
        await asyncio.wrap_future(thread.load_adapter("b", str(path)))  # while the other adapter answers
        thread.submit([make_request("second", "b", outputs, tokens=30)])
        with pytest.raises(APIError) as error:
            await asyncio.wrap_future(thread.unload_adapter("b"))
        names = await finish(outputs, 2)
        await asyncio.wrap_future(thread.unload_adapter("b"))
        thread.submit([make_request("late", "b", outputs)])
        failure = await outputs.get()
        thread.submit([make_request("base", None, outputs)])
        names += await finish(outputs, 1)
        thread.stop()
        assert error.value.status == 409
        return names, failure

    names, failure = asyncio.run(run())
    assert names == ["first", "second", "base"] and [*adapters.states] == ["a"]
    assert isinstance(failure, APIError) and failure.status == 404


def test_aborted_requests_free_their_rows(adapters: AdapterSet) -> None:
    async def run() -> list[str]:
        outputs, others = asyncio.Queue(), asyncio.Queue()
        engine = make_engine(adapters)
        thread = EngineThread(engine, adapters)
        thread.submit([make_request(f"long{i}", None, others, 50) for i in range(5)])
        await others.get()
        thread.abort([f"long{i}" for i in range(5)])
        thread.submit([make_request(f"short{i}", None, outputs) for i in range(3)])
        names = await finish(outputs, 3)
        thread.stop()
        assert not engine.unfinished and not thread.waiting and not thread.running
        return names

    assert asyncio.run(run()) == ["short0", "short1", "short2"]


def test_a_failing_step_fails_its_requests_only(adapters: AdapterSet) -> None:
    def fail(answer: object) -> bool:
        raise ZeroDivisionError

    async def run() -> None:
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        thread = EngineThread(make_engine(adapters), adapters)
        broken = GenerationRequest("broken", [5], SamplingConfig(max_new_tokens=4), is_finished=fail)
        thread.submit([QueuedRequest(broken, None, outputs)])
        error = await outputs.get()
        assert isinstance(error, APIError) and error.status == 500
        thread.submit([make_request("next", None, outputs)])
        assert await finish(outputs, 1) == ["next"]
        assert thread.is_alive
        thread.stop()
        assert not thread.is_alive

    asyncio.run(run())


def test_nothing_waits_for_a_stopped_engine(adapters: AdapterSet) -> None:
    async def run() -> None:
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        thread = EngineThread(make_engine(adapters), adapters)
        thread.stop()
        for call in (
            lambda: thread.submit([make_request("late", None, outputs)]),
            lambda: thread.load_adapter("b", "missing"),
            lambda: thread.unload_adapter("a"),
        ):
            with pytest.raises(APIError) as error:
                call()
            assert error.value.status == 503

    asyncio.run(run())


def test_answers_of_nan_fail_and_the_server_continues(adapters: AdapterSet) -> None:
    async def run() -> list[Output]:
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        thread = EngineThread(make_engine(adapters), adapters)
        weight = adapters.model.norm.weight
        value = weight[0].item()
        for number in (float("nan"), value):
            with torch.no_grad():
                weight[0] = number
            thread.submit([make_request(str(number), None, outputs, tokens=1)])
            results.append(await outputs.get())
        thread.stop()
        return results

    results: list[Output] = []
    failure, answer = asyncio.run(run())
    assert isinstance(failure, APIError) and failure.status == 500
    assert isinstance(answer, TokenOutput) and answer.finish_reason == "length"
