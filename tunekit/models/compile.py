"""torch.compile on the layers of a decoder."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental import _config as shape_config

from tunekit import devices
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def check_compile(device: torch.device) -> None:
    """Raise UserError if torch.compile does not support the device."""
    row = devices.device_capabilities(device)
    if not row.compile:
        raise UserError(f"compile: torch.compile is not supported on {row.name}. Set compile=false.")


def compile_layers(model: Decoder, log: Callable[[str], object]) -> None:
    """Compile each kind of layer once, at the first forward pass, for any number of tokens and documents."""
    # With duck shapes, a token count that equals a channel count would be specialized like the channels.
    shape_config.use_duck_shape = False
    # Scales and epsilons are constants. As symbols they are traced, specialized and traced again, without caching.
    torch._dynamo.config.specialize_float = True
    model.flatten_rows = True
    for layer in model.layers:
        layer.compile(dynamic=True)

    def announce(*_: Any) -> None:
        hook.remove()
        cached = f"; cached in {os.environ[INDUCTOR_CACHE]} for later runs" if INDUCTOR_CACHE in os.environ else ""
        log(f"compiling the layers: about a minute the first time{cached}")

    hook = model.register_forward_pre_hook(announce)
