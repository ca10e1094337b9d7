"""Memory of the cache in which recipes that sample answers keep their keys and values."""

from typing import NamedTuple, Protocol, runtime_checkable

from torch._subclasses import FakeTensorMode

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.distributed.parallelize import parallelize_fake
from tunekit.kernels import fake_mode
from tunekit.models.precision import DTYPES
from tunekit.plan.layer_profile import materialize_fake
from tunekit.plan.memory_tracker import MemoryTracker
from tunekit.quantization.config import NoQuantization


@runtime_checkable
class SamplesAnswers(Protocol):
    """A config of a recipe that samples answers in training."""

    data: DatasetConfig | MixtureBase

    num_cached_seqs: int
    num_prompts: int
    steps_per_prompt: int


class RolloutShape(NamedTuple):
    """Answers in the cache at once, and the tokens of each with its prompt; 0 of a recipe that samples none here."""

    rows: int = 0
    length: int = 0

    @staticmethod
    def from_config(cfg: object) -> "RolloutShape":
        samples = isinstance(cfg, SamplesAnswers)
        return RolloutShape(cfg.num_cached_seqs, cfg.data.max_length) if samples else RolloutShape()


CACHE_BYTES: dict[str, int] = {}  # by all options that it depends on


def rollout_cache_bytes(
    source: HFCheckpoint, shape: RolloutShape, compute: str, dims: ParallelDims, device: str
) -> int:
    """Bytes of the cache on one rank, which has its share of the heads with tensor parallelism."""
    if not shape.rows:
        return 0
    key = repr((source.spec, shape, compute, dims.tp, device))
    if key not in CACHE_BYTES:
        decoder = build.build_meta_model(source, NoQuantization(), FrozenModel())
        parallelize_fake(decoder, dims)
        decoder.compute_dtype = DTYPES[compute]
        with fake_mode.fake_mode(device), FakeTensorMode(allow_non_fake_inputs=True):
            materialize_fake(decoder)
            with MemoryTracker() as tracker:
                cache = decoder.make_cache(*shape)
                CACHE_BYTES[key] = tracker.bytes
                del cache
    return CACHE_BYTES[key]
