"""The generation step, proved without a GPU: constant shapes, no host wait, replay as a graph, and its numbers."""

import itertools
import warnings
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.decode_ops import DecodeOps, Op, build_config, build_model, gpu_shapes
from tests.gpu.flash_on_cpu import cpu_flash
from tests.gpu.recorded_step import record_step
from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import load_model, make_checkpoint, random_tokens, relative_error
from tests.unit.kernels.test_attention import make_sinks
from tunekit.adapters.config import LoRAConfig
from tunekit.distributed.context import DistributedContext
from tunekit.generation import engine, slot_batch
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.generate import generate_batch
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.slot_batch import DecodeStep, SlotBatch, StepGraphs
from tunekit.generation.token_draw import SamplingGroup
from tunekit.kernels import attention_choice, attention_cpu, attention_decode, glu, rms_norm, rope
from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.attention_decode import CachePositions, attend_decode
from tunekit.kernels.sequence_cases import attention_definition, visible_mask
from tunekit.models import decode, decoder, forward_context
from tunekit.models.decode import StepGraph
from tunekit.models.decoder import Decoder

# Widths of real models where kernels ask for an alignment.
WIDE = {
    "llama3.2": {"head_dim": 64},
    "gemma3": {"head_dim": 64},
    "gpt-oss": {"head_dim": 64, "hidden_size": 64, "intermediate_size": 64},
    "qwen3-moe": {"head_dim": 64, "hidden_size": 64, "moe_intermediate_size": 32},
    "llama4": {"head_dim": 64, "hidden_size": 64, "intermediate_size": 32},
    "deepseek-v3": {"hidden_size": 64, "moe_intermediate_size": 32},
    "qwen3-next": {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "falcon-h1": {"head_dim": 64, "hidden_size": 64},
    "nemotron-h": {"head_dim": 64, "hidden_size": 64, "moe_intermediate_size": 32},
    "lfm2": {"num_attention_heads": 2, "hidden_size": 128},
}
# Kernels of a layer and of the rest of a step. A captured graph launches all of them at once.
MAX_KERNELS = {
    "llama3.2": (18, 17),
    "gemma3": (22, 20),
    "gpt-oss": (51, 17),
    "qwen3-moe": (45, 17),
    "llama4": (34, 17),
    "deepseek-v3": (47, 17),
    "qwen3-next": (78, 17),
    "falcon-h1": (60, 19),
    "nemotron-h": (25, 15),
    "lfm2": (21, 17),
}
SAMPLINGS = {
    "greedy": SamplingConfig(max_new_tokens=64),
    "temperature": SamplingConfig(1.0, max_new_tokens=64),
    "top-k and top-p": SamplingConfig(0.7, top_k=50, top_p=0.9, max_new_tokens=64),
    "top-p": SamplingConfig(0.7, top_p=0.9, max_new_tokens=64),
    "min-p": SamplingConfig(0.7, min_p=0.1, max_new_tokens=64),
    "repetition penalty": SamplingConfig(0.7, repetition_penalty=1.2, max_new_tokens=64),
}


def step_ops(name: str, sampling: SamplingConfig, *used: int, rows: int = 4) -> tuple[Decoder, list[DecodeOps]]:
    """The operators of steps with these numbers of slots in use."""
    model = build_model(build_config(name, **WIDE[name]))
    batch = SlotBatch(model, rows, 4000, "processed_logprobs", StepGraphs())
    if sampling.repetition_penalty != 1:
        batch.state.seen = torch.zeros(rows, model.spec.vocab, dtype=torch.bool, device="meta")
    step = DecodeStep(batch, rows, SamplingGroup(sampling, None), num_logprobs=0)
    recorded = []
    for count in used:
        step.cache.cache_length = count
        with DecodeOps() as ops, ops.watch_layers(model):
            step.run_step()
        recorded.append(ops)
    return model, recorded


@pytest.mark.parametrize("name", WIDE)
def test_a_step_has_constant_shapes_and_never_waits_for_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`DecodeOps` raises at every operator that reads the device, and at every copy from or to the host."""
    with gpu_shapes(monkeypatch):
        model, (first, *others) = step_ops(name, SAMPLINGS["greedy"], 300, 301, 511)
    assert all(ops.ops == first.ops for ops in others)
    layers = len(list(model.layers))
    counts = first.count(layer=True) / layers, first.count(layer=False)
    assert counts[0] <= MAX_KERNELS[name][0] and counts[1] <= MAX_KERNELS[name][1], counts


@pytest.mark.parametrize(("name", "expected"), [("temperature", []), ("min-p", ["div"])])
def test_the_draw_reads_the_vocabulary_few_times(
    name: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors as large as the logits: the cast (a view for `DecodeOps`), the temperature, probabilities, their sums."""
    with gpu_shapes(monkeypatch):
        model, (ops,) = step_ops("llama3.2", SAMPLINGS[name], 300)
    large = [op.name for op in ops.ops if op.launches and op.shapes == ((4, model.spec.vocab),)]
    assert [op for op in large if op not in ("ge", "mul")] == [*expected, "softmax", "cumsum"]
    assert sum(op.name == "to" and op.shapes == ((4, model.spec.vocab),) for op in ops.ops) == 1


@pytest.mark.parametrize("name", SAMPLINGS)
def test_no_way_of_sampling_waits_for_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_shapes(monkeypatch):
        _, (ops,) = step_ops("llama3.2", SAMPLINGS[name], 300)
    sorts = [op for op in ops.ops if op.name == "sort"]
    assert bool(sorts) == (name == "top-p"), "a sort of the vocabulary"


def test_the_window_costs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and chunks are starts in the cache: one kernel call a layer, and nothing as long as the cache."""
    with gpu_shapes(monkeypatch):
        model, (ops,) = step_ops("gemma3", SAMPLINGS["greedy"], 300)
    assert sum(op.name == "_flash_attention_forward" for op in ops.ops) == len(list(model.layers))
    assert not [op for op in ops.ops if is_as_long_as_the_cache(op)]


def is_as_long_as_the_cache(op: Op) -> bool:
    """Whether an operator makes something new for every slot."""
    return op.launches and op.name != "index_copy_" and any(size >= 512 for shape in op.shapes for size in shape)


# ---- The numbers of each route ----

RULES = [
    AttentionParams(0.3),
    AttentionParams(0.3, 1),
    AttentionParams(0.3, 5),
    AttentionParams(0.3, chunk=4),
    AttentionParams(0.3, 3, 7),
    AttentionParams(0.3, 100),
]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors take the way of a GPU, with FlashAttention in float64 inside. fp32 counts as a half."""
    monkeypatch.setattr(attention_choice, "device_type", lambda x: "cuda")
    monkeypatch.setattr(attention_choice, "HALF_DTYPES", (torch.float32,))
    with cpu_flash():
        yield


@pytest.mark.usefixtures("hopper")
@pairwise(rule=RULES, heads=[(6, 2), (6, 6), (6, 1)], sunk=[False, True])
def test_flash_decoding(rule: AttentionParams, heads: tuple[int, int], sunk: bool) -> None:
    """Rows of different lengths; slots after the last token hold values that must not be seen."""
    check_decode(rule, heads, sunk)


def fake_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel as it is specified."""
    assert q.shape[1] == k.shape[1] and bias.dtype == q.dtype
    scores = (q.double() @ k.double().mT) * scale + bias.double()
    return (scores.softmax(-1) @ v.double()).type_as(q), scores.logsumexp(-1).float()


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decoding_without_flash(rule: AttentionParams, sunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "device_type", lambda x: "cuda")
    monkeypatch.setattr(attention_decode, "run_efficient", fake_efficient)
    check_decode(rule, (6, 2), sunk)


def check_decode(rule: AttentionParams, heads: tuple[int, int], sunk: bool) -> None:
    slots, dim, width = 24, 12, 16
    q = torch.randn(3, 1, heads[0], dim)
    k, v = (torch.zeros(3, slots, heads[1], width) for _ in range(2))
    k[..., :dim], v[..., :dim] = (2 * torch.randn(3, slots, heads[1], dim) for _ in range(2))
    sinks = make_sinks(heads[0]).detach() if sunk else None
    positions = torch.tensor([[0], [9], [19]])
    y = attend_decode(q, k, v, CachePositions(positions, slots, 20), rule, sinks)[..., :dim]
    expected = attention_definition(
        q, k[..., :dim], v[..., :dim], rule, visible_mask(positions, torch.arange(slots), rule), sinks
    )
    assert relative_error(y.double(), expected) < 1e-6


# ---- Whole generation as on a GPU ----

FAMILIES = [
    "llama3.2", "mistral", "gemma2", "gemma3", "gemma4-shared", "gpt-oss", "llama4", "deepseek-v3", "qwen3-next",
    "phi3-long", "cohere2", "gemma3n", "lfm2-biases", "bamba", "falcon-h1", "nemotron-h",
]  # fmt: skip
PROMPTS = [random_tokens(1, length, seed=length)[0].tolist() for length in (7, 1, 12, 3)]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, hopper: None) -> list[Any]:
    """Static shapes, tokens read one step late, and recorded operators for a graph; the captures are listed."""
    captures: list[Any] = []

    def record(step: Any) -> Any:
        captures.append(step)
        return record_step(step)

    for module in (forward_context, decoder, engine, slot_batch):
        monkeypatch.setattr(module, "has_static_shapes", lambda device: True)
    monkeypatch.setattr(slot_batch, "get_capture", lambda model: record)
    monkeypatch.setattr(attention_cpu, "is_available", lambda: False)  # C++ is no operator
    for module in (rope, rms_norm, glu):
        monkeypatch.setattr(module, "use_torch_fallback", lambda *args: True)
    return captures


GREEDY = SamplingConfig(max_new_tokens=16)
RANDOM = SamplingConfig(1.3, top_k=20, top_p=0.9, max_new_tokens=16, seed=5)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [pytest.param(name, (GREEDY, RANDOM)[i % 2], id=name) for i, name in enumerate(FAMILIES)],
)
def test_a_replayed_step_draws_the_tokens_of_eager_steps(
    name: str, sampling: SamplingConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = load_model(make_checkpoint(tmp_path, name))
    expected = generate_batch(model, PROMPTS, sampling, frozenset())
    captures = request.getfixturevalue("simulated")
    assert generate_batch(model, PROMPTS, sampling, frozenset()) == expected
    assert captures


def run_turns(model: Decoder) -> dict[str, list[tuple[int, list[int]]]]:
    """Requests with different options that arrive later, stop, end at their limits, and continue after more tokens."""
    generation = GenerationEngine(model, 4, 128, DistributedContext(0, "cpu"))
    samplings = SamplingConfig(max_new_tokens=24), SamplingConfig(0.9, top_k=9, max_new_tokens=30, seed=3)
    requests = [
        GenerationRequest(
            f"{i}", PROMPTS[i % 4], samplings[i % 2], frozenset({7, 8, 9}), num_logprobs=i, keep_cache=i < 4
        )
        for i in range(7)
    ]
    outputs: dict[str, list[tuple[int, list[int]]]] = {request.request_id: [] for request in requests}
    continued = {"1": [5, 6, 7], "2": [4], "3": [11] * 9}
    while requests or generation.has_unfinished_requests:
        if requests:
            generation.add_request(requests.pop(0))
        for output in generation.step():
            outputs[output.request_id].append((output.token, [token for token, _ in output.top_logprobs]))
            if output.finish_reason is not None and output.request_id in continued:
                generation.append_tokens(output.request_id, continued.pop(output.request_id))
    assert not continued
    return outputs


@pytest.mark.parametrize("name", ["llama3.2", "gemma3", "deepseek-v3", "qwen3-next", "phi3-long", "falcon-h1"])
def test_replayed_steps_with_changing_rows(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Padded batches and reserved rows: tokens and the most likely ones are those of steps on the CPU."""
    model = load_model(make_checkpoint(tmp_path, name))
    expected = run_turns(model)
    captures = request.getfixturevalue("simulated")
    assert run_turns(model) == expected
    assert captures or model.rope_switch_lengths


@pytest.mark.usefixtures("simulated")
def test_rows_without_a_request_stay_inside_the_cache(tmp_path: Path) -> None:
    """Three rows at a time run as four, for more steps than the cache has positions."""
    model = load_model(make_checkpoint(tmp_path, "llama3.2"))
    generation = GenerationEngine(model, 4, 42, DistributedContext(0, "cpu"))
    requests = [GenerationRequest(f"{i}", PROMPTS[i % 4], SamplingConfig(1.0, max_new_tokens=30)) for i in range(15)]
    while requests or generation.has_unfinished_requests:
        while requests and len(generation.unfinished) < 3:
            generation.add_request(requests.pop())
        generation.step()


def test_a_larger_cache_is_captured_again(
    tmp_path: Path, simulated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_context, "MIN_VISIBLE", 16)
    monkeypatch.setattr(decode, "MIN_REPLAYS", 1)
    model = load_model(make_checkpoint(tmp_path, "mistral"))
    answers = generate_batch(model, PROMPTS, SamplingConfig(max_new_tokens=60), frozenset())
    assert len(simulated) == 4  # 16, 32, 64 and all 72 slots after a prompt of 12 tokens
    monkeypatch.undo()
    assert answers == generate_batch(model, PROMPTS, SamplingConfig(max_new_tokens=60), frozenset())


# ---- When a step is captured ----


class Work:
    """A step that counts how often it was run, and how often it was captured."""

    def __init__(self) -> None:
        self.runs = self.captures = 0

    def step(self) -> None:
        self.runs += 1

    def capture(self, step: Any) -> Any:
        self.captures += 1
        return step


def test_every_run_is_one_step_whether_captured_or_not() -> None:
    work = Work()
    graph = StepGraph(work.step, work.capture)
    for count, key in enumerate([256] * 6 + [512] * 5, start=1):
        graph.run(key, num_left=50)
        assert work.runs == count
    assert work.captures == 2


def test_a_step_that_was_captured_before_is_captured_at_once() -> None:
    """Its kernels are loaded, and it does not wait for the device."""
    captured: set[Hashable] = set()
    first, second = Work(), Work()
    for work in (first, second):
        graph = StepGraph(work.step, work.capture, captured=captured)
        for count in range(1, 6):
            graph.run(256, num_left=50)
            assert work.runs == count
            assert work.captures == int(work is second or count > 2)


def test_a_new_cache_is_captured_without_eager_steps(tmp_path: Path, simulated: list[Any]) -> None:
    """After `sleep`, as in reinforcement learning: the same tokens from graphs of the new cache."""
    model = load_model(make_checkpoint(tmp_path, "llama3.2"), LoRAConfig(4))
    generation = GenerationEngine(model, 4, 64, None)
    requests = [
        GenerationRequest(f"{i}", prompt, SamplingConfig(1.0, max_new_tokens=12, seed=3))
        for i, prompt in enumerate(PROMPTS)
    ]
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *unused: passes.append(1))
    expected, counts = generation.generate(requests), [len(passes)]
    for _ in range(2):
        generation.sleep()
        assert generation.generate(requests) == expected
        counts.append(len(passes))
    first, *later = [after - before for before, after in itertools.pairwise([0, *counts])]
    assert later == [first - 2] * 2, "only prompts and the recording run the model"
    assert len(simulated) == 3


def test_the_last_tokens_are_not_worth_a_capture() -> None:
    work = Work()
    graph = StepGraph(work.step, work.capture)
    for left in range(8, 0, -1):
        graph.run(256, num_left=left)
    assert (work.runs, work.captures) == (8, 0)


def test_a_step_that_waits_for_the_device_is_never_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Work()

    def run_detecting_waits(step: Any) -> bool:
        step()
        return True

    monkeypatch.setattr(decode, "run_detecting_waits", run_detecting_waits)
    decode.warn_eager.cache_clear()
    graph = StepGraph(work.step, work.capture)
    for _ in range(10):
        graph.run(256, num_left=50)
    assert (work.runs, work.captures) == (10, 0)
    assert "CUDA graph" in capsys.readouterr().err


NOTICE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


@pytest.fixture
def debug_mode(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """The debug mode of torch.cuda without a GPU, with the notice that it gives when it is first set."""
    modes: list[int | str] = [0]

    def set_mode(mode: int | str) -> None:
        if len(modes) == 1:
            warnings.warn(NOTICE, UserWarning, stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return modes


@pytest.mark.parametrize("waits", [True, False])
def test_only_waits_are_detected_and_other_warnings_are_shown(waits: bool, debug_mode: list[int | str]) -> None:
    """Texts as torch 2.11 has them. The notice speaks of synchronizing operations, too, and is no wait."""

    def step() -> None:
        assert debug_mode[-1] == "warn"
        warnings.warn("a kernel is slow", RuntimeWarning, stacklevel=1)
        if waits:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert decode.run_detecting_waits(step) == waits
    assert [(str(w.message), w.category, w.filename) for w in shown] == [("a kernel is slow", RuntimeWarning, __file__)]
    assert debug_mode == [0, "warn", 0]


# ---- Rows that have ended ----


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_batches_shrink_when_rows_end(device: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """To powers of two on a GPU, which reads a token one step late."""
    model = load_model(make_checkpoint(tmp_path, "qwen2"))
    full = generate_batch(model, PROMPTS, SamplingConfig(max_new_tokens=40), frozenset())
    if device == "GPU":
        request.getfixturevalue("simulated")
    ends = {0: 3, 1: 5, 2: 40, 3: 20}
    sizes: list[int] = []
    monkeypatch = request.getfixturevalue("monkeypatch")
    run = slot_batch.StepGraph.run
    monkeypatch.setattr(
        slot_batch.StepGraph, "run", lambda graph, *args: (sizes.append(graph.step.__self__.size), run(graph, *args))[1]
    )
    counts = {tuple(answer[:length]): length for answer, length in zip(full, ends.values(), strict=True)}
    sampling = SamplingConfig(max_new_tokens=40)
    answers = generate_batch(model, PROMPTS, sampling, frozenset(), is_finished=lambda answer: tuple(answer) in counts)
    assert answers == [answer[: ends[row]] for row, answer in enumerate(full)]
    assert sizes == ([4] * 5 + [2] * 15 + [1] * 19 if device == "GPU" else [4] * 2 + [3] * 2 + [2] * 15 + [1] * 20)


# ---- Sampling ----


def sorted_choice(sampling: SamplingConfig, logits: Tensor, numbers: Tensor) -> Tensor:
    """Draw from a stable sort of the whole vocabulary, as the choice is defined."""
    shares = (logits.float() / sampling.temperature).softmax(-1)
    probabilities, ids = shares.sort(dim=-1, descending=True, stable=True)
    probabilities, ids = probabilities[:, : sampling.top_k], ids[:, : sampling.top_k]
    before = probabilities.cumsum(-1) - probabilities
    shares = probabilities * (before < sampling.top_p * probabilities.sum(-1, keepdim=True))
    sums = shares.cumsum(-1)
    index = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)
    return ids.gather(-1, index.clamp(max=(shares > 0).sum(-1, keepdim=True) - 1)).squeeze(-1)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("top_k", [1, 3, 50, 1000])
def test_top_k_draws_what_a_stable_sort_draws(top_k: int, top_p: float) -> None:
    """Logits in bf16 have many ties, also at the boundary of the top k."""
    sampling = SamplingConfig(0.7, top_k=top_k, top_p=top_p)
    logits = (2 * torch.randn(64, 500)).round().bfloat16()
    numbers = torch.rand(64)
    assert torch.equal(sampling.sample(logits, numbers), sorted_choice(sampling, logits, numbers))


def test_temperature_alone_draws_from_the_vocabulary_in_its_order() -> None:
    logits = torch.randn(64, 500)
    sums = logits.double().softmax(-1).cumsum(-1)
    numbers = torch.rand(64)
    expected = torch.searchsorted(sums, numbers[:, None].double(), right=True).squeeze(-1)
    assert torch.equal(SamplingConfig(1.0).sample(logits, numbers), expected)
