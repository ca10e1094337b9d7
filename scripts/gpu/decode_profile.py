"""Where a decode step of the engine spends its time: total, GPU time of the graph, longest kernels, host functions."""

import cProfile
import io
import pstats
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest

WARMUP_STEPS, TIMED_STEPS, PROFILED_STEPS, HOST_STEPS, NUM_REPLAYS = 6, 30, 20, 50, 20
NUM_KERNELS, NUM_FUNCTIONS = 12, 25
MIN_TOKENS = WARMUP_STEPS + 2 * TIMED_STEPS + PROFILED_STEPS + HOST_STEPS + 2 * NUM_REPLAYS  # for `print_split`


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_call(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Wall time of a call, until the device has finished all of them."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def print_split(engine: GenerationEngine, requests: list[GenerationRequest], name: str, has_details: bool) -> None:
    """Run the first steps of requests that have at least MIN_TOKENS tokens. Ends the requests."""
    device = engine.model.device
    for request in requests:
        engine.add_request(request)
    for _ in range(WARMUP_STEPS):
        engine.step()
    step = seconds_per_call(engine.step, TIMED_STEPS, device)
    start = time.process_time()
    for _ in range(TIMED_STEPS):
        engine.step()
    processor = (time.process_time() - start) / TIMED_STEPS  # waiting for an event takes processor time, too
    print(f"{name}: step {1e3 * step:.2f} ms, processor time {1e3 * processor:.2f} ms", flush=True)
    if has_details:
        print_kernels(engine, name)
        print_functions(engine, name)
    if device.type == "cuda":
        print_replay(engine, name, step)
    for request in requests:
        engine.abort(request.request_id)
    engine.sleep()


def print_replay(engine: GenerationEngine, name: str, step: float) -> None:
    """Time of the last step's graph alone. Its tokens are lost: positions and random numbers move on."""
    last = [*engine.graphs.steps.values()][-1]
    if last.graph.replay is None:
        print(f"{name}: no graph", flush=True)
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(NUM_REPLAYS):
        last.graph.replay()
    end.record()
    end.synchronize()
    replay = begin.elapsed_time(end) / NUM_REPLAYS
    single = 1e3 * min(seconds_per_call(last.graph.replay, 1, engine.model.device) for _ in range(NUM_REPLAYS))
    rest = 1e3 * step - replay
    print(f"{name}: graph {replay:.2f} ms of the GPU ({single:.2f} ms alone, with its launch), rest {rest:.2f} ms")


def print_kernels(engine: GenerationEngine, name: str) -> None:
    """Longest kernels of a step, or operators on the CPU."""
    is_gpu = engine.model.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.step()
        synchronize(engine.model.device)
    rows = [
        (event.self_device_time_total if is_gpu else event.self_cpu_time_total, event.count, event.key)
        for event in profiler.key_averages()
    ]
    rows = [row for row in rows if row[0] > 0]  # not the calls of the host
    total, calls = sum(row[0] for row in rows), sum(row[1] for row in rows)
    steps = PROFILED_STEPS
    print(f"{name}: kernels {total / steps / 1e3:.2f} ms a step, {calls / steps:.0f} calls a step")
    for microseconds, count, key in sorted(rows, reverse=True)[:NUM_KERNELS]:
        print(f"  {microseconds / steps / 1e3:8.3f} ms a step {count / steps:7.1f} calls  {key[:100]}", flush=True)


def print_functions(engine: GenerationEngine, name: str) -> None:
    """Functions in which the host spends most time, by cProfile, which doubles the time of short ones."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(HOST_STEPS):
        engine.step()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(NUM_FUNCTIONS)
    lines = [line[:130] for line in text.getvalue().splitlines() if line.strip()]
    print(f"{name}: host functions of {HOST_STEPS} steps", *lines[-NUM_FUNCTIONS - 1 :], sep="\n  ", flush=True)
