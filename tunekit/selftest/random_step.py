"""Training steps of models with random weights, and their operations. Used by the benchmarks, too."""

from collections.abc import Callable

import torch
from torch import Tensor

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.data.dataloader.batch import Batch
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Embedding, Linear
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import Attention, DecoderSpec
from tunekit.optim.config import AdamWConfig
from tunekit.plan.step_time import linear_flops
from tunekit.quantization.config import NoQuantization

NOISE = 2**20  # random numbers that are repeated to fill weights: to draw a billion takes seconds


def build_random_model(  # noqa: PLR0913
    spec: DecoderSpec,
    quantization: NoQuantization,
    adapter: NoAdapter | LoRAConfig,
    memory: MemoryConfig,
    precision: PrecisionConfig,
    device: torch.device,
) -> Decoder:
    """Build a model as recipes do, with random numbers instead of a checkpoint, which are drawn on the device."""
    with torch.device("meta"):
        model = Decoder(spec)
    quantization.apply(model)
    adapter.apply(model)
    precision.apply(model, {}, device)
    memory.apply(model, device)
    model.to_empty(device=device)
    model.tie()
    noise = torch.randn(NOISE, device=device) * 0.02
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Linear) and ".lora_" not in name:
                module.load_weight(repeat_to(noise, module.out_features, module.in_features))
            elif isinstance(module, Embedding):
                module.weight.copy_(repeat_to(noise, *module.weight.shape))
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.fill_(1.0)
    adapter.init_weights(model, 0)
    return model


def repeat_to(noise: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape that repeats some numbers."""
    count = torch.Size(shape).numel()
    return noise.repeat(-(-count // len(noise)))[:count].view(shape)


def build_training_step(model: Decoder, adapter: NoAdapter | LoRAConfig, batch: Batch) -> Callable[[], None]:
    """Forward pass, backward pass and AdamW step on the same batch."""
    optimizer, loss = AdamWConfig(lr=1e-5).build(adapter.param_groups(model)), CrossEntropy()

    def run_step() -> None:
        (loss(model, batch) / batch.num_target_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run_step


def count_operations(model: Decoder, batch: Batch) -> float:
    """4 operations per frozen weight and token, 6 per trained one, and attention within documents."""
    assert batch.cu_seqlens is not None
    lengths = batch.cu_seqlens.diff().double()
    pairs = float((lengths * (lengths + 1) / 2).sum())
    mixers = [layer.mixer for layer in model.spec.layers]
    channels = sum(m.heads * m.head_dim for m in mixers if isinstance(m, Attention))
    return sum(linear_flops(model, 1)) * batch.tokens.numel() + 3 * 4 * channels * pairs


def count_bytes(model: Decoder) -> float:
    """Weights are read forward and backward; those that are trained have a gradient and two moments, and change."""
    parameters = [*model.parameters()]
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    return 2 * sum(p.nbytes for p in parameters) + 8 * trained
