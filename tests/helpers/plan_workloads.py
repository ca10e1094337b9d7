"""Small models and workloads for tests of plans."""

from dataclasses import replace

from tunekit import assets
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.optim.config import AdamWConfig
from tunekit.plan.workload import Workload
from tunekit.quantization.config import NoQuantization


def make_checkpoint(*layers: Layer, tied: bool = False) -> HFCheckpoint:
    """Checkpoint with a vocabulary of 1,024 and width 128, without weights."""
    checkpoint = HFCheckpoint.open(assets.PRESETS["tunekit/llama3_2_1b"], "small")
    return replace(checkpoint, spec=DecoderSpec(1024, 128, layers, tie_word_embeddings=tied))


def build_workload(checkpoint: HFCheckpoint, **changes: object) -> Workload:
    """Full fine-tuning in bf16 with AdamW: rows of 64 tokens, batch size 4 in micro-batches of 2."""
    workload = Workload(
        checkpoint,
        64,
        4,
        2,
        NoAdapter(),
        NoQuantization(),
        PrecisionConfig("bf16"),
        MemoryConfig(),
        AdamWConfig(),
        CrossEntropy(),
        ParallelConfig(),
        max_grad_norm=1.0,
        random_init=True,
    )
    return replace(workload, **changes)
