"""Generation with continuous batching on any layout. Has few imports because each rank loads it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization

Answers = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class EngineCase:
    """A model, its layout, and the prompts of each data parallel rank."""

    folder: Path
    parallel: ParallelConfig
    prompts: dict[str, list[int]]
    owners: dict[str, int]  # data parallel rank that has the prompt; without an entry: 0


def run_engine(case: EngineCase) -> Answers:
    """Tokens and log-probabilities of the requests of this rank, two turns each. Later requests arrive later."""
    with DistributedContext(0, "cpu", case.parallel) as dist:
        options = NoQuantization(), FrozenModel(), PrecisionConfig("fp32", "fp32", "fp32"), MemoryConfig()
        model = build.build_model(HFCheckpoint.open(case.folder), *options, dist)
        engine = GenerationEngine(model, 2, 64, dist)
        arriving = [name for name in case.prompts if dist.world_size == 1 or case.owners.get(name, 0) == dist.dp_rank]
        answers: Answers = {name: [] for name in arriving}
        turns = dict.fromkeys(arriving, 1)
        while dist.max_over_ranks(len(arriving))[0] or engine.has_unfinished_requests:
            if arriving:
                name = arriving.pop(0)
                sampling = SamplingConfig(1.0, max_new_tokens=4 + len(name), seed=3)
                engine.add_request(GenerationRequest(name, case.prompts[name], sampling, keep_cache=True))
            for output in engine.step():
                answers[output.request_id].append((output.token, output.logprob))
                if output.finish_reason and turns[output.request_id]:
                    turns[output.request_id] -= 1
                    engine.append_tokens(output.request_id, [5, 6, 7])
        return answers


def run_engines(cases: list[EngineCase]) -> list[Answers]:
    """Run all cases in one start of the ranks."""
    torch.set_num_threads(1)
    return [run_engine(case) for case in cases]
