"""Launches and host waits of a layer on a simulated CUDA device, counted by benchmarks/launch_counter.py."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    pytest.importorskip("triton")
    yield import_module("kernel_launches")


def per_layer(benchmark: ModuleType, build: Callable, method: str) -> tuple[float, set[str]]:
    """Launches of a layer, forward and backward, and the waits that each further layer adds."""
    counts = [benchmark.count_launches(build, method, n, (9, 0)) for n in (1, 2)]
    shallow, deep = (c.launches["forward"] + c.launches["backward"] for c in counts)
    added = {f"{phase}: {name}" for (phase, name), n in (counts[1].causes - counts[0].causes).items() if n}
    return deep - shallow, added


@pytest.mark.parametrize(("method", "bound"), [("full", 64), ("lora", 81), ("qlora", 95)])
def test_layers_launch_no_more_than_bound_and_never_wait(benchmark: ModuleType, method: str, bound: int) -> None:
    launches, waits = per_layer(benchmark, benchmark.build_tunekit_step, method)
    assert launches <= bound
    assert waits == set()


def test_lora_layer_launches_at_most_60_percent_of_peft(benchmark: ModuleType) -> None:
    launches, _ = per_layer(benchmark, benchmark.build_tunekit_step, "lora")
    build_peft_step = partial(benchmark.build_peft_step, autocast=False)
    peft_launches, _ = per_layer(benchmark, build_peft_step, "lora")
    assert launches <= 0.6 * peft_launches


def test_counter_sees_waits_and_no_views(benchmark: ModuleType) -> None:
    """Against a program whose launches and waits are known."""

    def step(counter) -> None:
        counter.phase = "forward"
        x = torch.empty(4, 6, device="cuda", requires_grad=True)
        y = (x.view(24)[:, None] * 2).sum()  # two launches
        torch.ones(3).to("cuda", non_blocking=True)
        torch.ones(3).to("cuda")  # waits
        float(y.detach())  # waits
        y.detach().cpu()  # waits
        counter.phase = "backward"
        y.backward()  # fills the first gradient, multiplies

    counts = import_module("launch_counter").count_step(step)
    assert dict(counts.launches) == {"forward": 2, "backward": 2}
    assert dict(counts.waits) == {"forward": 3}
