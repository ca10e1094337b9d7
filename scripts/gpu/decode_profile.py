"""Time of a decode step of the engine: total, GPU time of the CUDA graph, longest kernels, longest host functions."""

import cProfile
import io
import pstats
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest
from tunekit.selftest.context import synchronize

NUM_WARMUP_STEPS, NUM_TIMED_STEPS, NUM_PROFILED_STEPS, NUM_HOST_STEPS, NUM_REPLAYS = 6, 30, 20, 50, 20
NUM_KERNELS, NUM_FUNCTIONS = 12, 25
# New tokens that each request of `print_step_profile` needs.
MIN_NEW_TOKENS = NUM_WARMUP_STEPS + 2 * NUM_TIMED_STEPS + NUM_PROFILED_STEPS + NUM_HOST_STEPS + 2 * NUM_REPLAYS


def measure_time_per_call(fn: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """Seconds per call, including the time until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(num_calls):
        fn()
    synchronize(device)
    return (time.perf_counter() - start) / num_calls


def print_step_profile(
    engine: GenerationEngine, requests: list[GenerationRequest], name: str, with_details: bool
) -> None:
    """Run the first steps of requests with at least MIN_NEW_TOKENS new tokens, print their times, and abort them."""
    device = engine.model.device
    for request in requests:
        engine.add_request(request)
    for _ in range(NUM_WARMUP_STEPS):
        engine.step()
    step_time = measure_time_per_call(engine.step, NUM_TIMED_STEPS, device)
    start = time.process_time()
    for _ in range(NUM_TIMED_STEPS):
        engine.step()
    cpu_time = (time.process_time() - start) / NUM_TIMED_STEPS  # includes waiting for events
    print(f"{name}: step time {1e3 * step_time:.2f} ms, CPU time {1e3 * cpu_time:.2f} ms", flush=True)
    if with_details:
        print_longest_kernels(
            lambda: [engine.step() for _ in range(NUM_PROFILED_STEPS)], NUM_PROFILED_STEPS, name, device, NUM_KERNELS
        )
        print_longest_functions(engine, name)
    if device.type == "cuda":
        print_replay_time(engine, name, step_time)
    for request in requests:
        engine.abort(request.request_id)
    engine.sleep()


def print_replay_time(engine: GenerationEngine, name: str, step_time: float) -> None:
    """Print the time of the last step's CUDA graph. Tokens are lost: replays advance positions and random numbers."""
    graph = [*engine.graphs.steps.values()][-1].graph
    if graph.replay is None:
        print(f"{name}: no CUDA graph", flush=True)
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    replay = start.elapsed_time(end) / NUM_REPLAYS
    single = 1e3 * min(measure_time_per_call(graph.replay, 1, engine.model.device) for _ in range(NUM_REPLAYS))
    times = f"{replay:.2f} ms of GPU time ({single:.2f} ms for a single one with its launch)"
    print(f"{name}: graph replay {times}, {1e3 * step_time - replay:.2f} ms of a step outside of the graph")


def print_longest_kernels(
    fn: Callable[[], object], num_steps: int, name: str, device: torch.device, num_kernels: int
) -> None:
    """Print the kernels, on the CPU the operators, with the most time per step. `fn` runs `num_steps` steps."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
        fn()
        synchronize(device)
    rows = [
        (event.self_device_time_total if is_gpu else event.self_cpu_time_total, event.count, event.key)
        for event in profiler.key_averages()
    ]
    rows = [row for row in rows if row[0] > 0]  # without calls of the host
    microseconds, num_calls = sum(row[0] for row in rows), sum(row[1] for row in rows)
    print(f"{name}: kernels {microseconds / num_steps / 1e3:.2f} ms/step, {num_calls / num_steps:.0f} calls/step")
    for microseconds, num_calls, key in sorted(rows, reverse=True)[:num_kernels]:
        milliseconds = microseconds / num_steps / 1e3
        print(f"  {milliseconds:8.3f} ms/step {num_calls / num_steps:7.1f} calls/step  {key[:100]}", flush=True)


def print_longest_functions(engine: GenerationEngine, name: str) -> None:
    """Print the host functions with the most time. cProfile doubles the time of short functions."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_HOST_STEPS):
        engine.step()
    profiler.disable()
    output = io.StringIO()
    pstats.Stats(profiler, stream=output).sort_stats("tottime").print_stats(NUM_FUNCTIONS)
    lines = [line[:130] for line in output.getvalue().splitlines() if line.strip()]
    print(f"{name}: host functions, {NUM_HOST_STEPS} steps", *lines[-NUM_FUNCTIONS - 1 :], sep="\n  ", flush=True)
