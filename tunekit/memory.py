"""Memory for time, and time for memory: which activations are computed twice, and what is compiled."""

from dataclasses import dataclass

from tunekit.models.decoder import Decoder


@dataclass(frozen=True)
class Memory:
    recompute: bool = False  # keep only the input of each layer, and run the layer again in the backward pass
    compile: bool = False  # torch.compile on each layer; the first steps then take longer

    def apply(self, model: Decoder) -> None:
        model.recompute = self.recompute
        for layer in model.layers if self.compile else ():
            layer.compile(dynamic=True)
