"""The config of commands that generate answers, and the model that it describes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from tunekit import build
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.checkpoint.hf_checkpoint import ConfigOverrides
from tunekit.checkpoint.model_dir import ModelDirs
from tunekit.config.load import load_config
from tunekit.data.chat_template.chat_format import describe_split_markers, describe_unread_kwargs, with_chat_format
from tunekit.data.chat_template.template import TemplateKwargs, check_template_kwargs
from tunekit.data.tokenizer import Tokenizer
from tunekit.devices import DeviceChoice
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import REPLICATED, ParallelConfig
from tunekit.errors import UserError
from tunekit.generation.sampling import SamplingConfig
from tunekit.hub import download
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import Float8Config, FP4Config, NF4Config, NoQuantization

T = TypeVar("T", bound="InferenceConfig")
# A key at the start of an error, without what its flag leaves out.
KEY = re.compile(r"^(?:command line: )?(?:sampling\.|precision\.compute_)?(\w+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """The keys that these commands share."""

    model: str  # Directory of a checkpoint, adapter or run; a Hub name; tunekit/nano
    # Other values for keys of the model's config.json, such as `{max_position_embeddings: 131072}`
    config_overrides: ConfigOverrides = field(default_factory=dict)
    chat_template: str | None = None  # Jinja file, or the name of a bundled template, that replaces the model's
    # Values of template variables, such as {enable_thinking: false}
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    sampling: SamplingConfig = SamplingConfig()  # How answers are generated
    quantization: NoQuantization | NF4Config | FP4Config | Float8Config = NoQuantization()  # How the weights are stored
    precision: PrecisionConfig = PrecisionConfig()  # dtypes of weights and computation
    parallel: ParallelConfig = REPLICATED  # How several devices share the rows or the weights
    device: DeviceChoice = "auto"  # `auto`: the first of cuda, xpu and mps that torch finds, else cpu

    def __post_init__(self) -> None:
        check_template_kwargs(self.chat_template_kwargs)

    @cached_property
    def model_dirs(self) -> ModelDirs:
        """The open directories of models, which are read once by checks and the command."""
        return ModelDirs()

    def check_model(self, name: str) -> Tokenizer:
        """The tokenizer of a model. Reads no weights. Raises UserError if the model cannot be used."""
        checkpoint, adapter, tokenizer = build.resolve_model(
            name, download.SMALL, self.config_overrides, self.model_dirs
        )
        require_language_model(checkpoint, name)
        build.check_parallelizable(checkpoint, self.quantization, adapter, self.parallel)
        return with_chat_format(tokenizer, self.chat_template, self.chat_template_kwargs)

    def load_model(self, name: str, dist: DistributedContext) -> tuple[Decoder, Tokenizer]:
        """A model and its tokenizer with the chat format of this config. Warns about its variables and markers."""
        model, tokenizer = build.load_for_inference(
            name, self.precision, dist, self.quantization, config_overrides=self.config_overrides, dirs=self.model_dirs
        )
        tokenizer = with_chat_format(tokenizer, self.chat_template, self.chat_template_kwargs)
        for warning in filter(None, (describe_unread_kwargs(tokenizer), describe_split_markers(tokenizer))):
            dist.log(f"warning: {warning}")
        return model, tokenizer


def config_from_flags(cls: type[T], values: Mapping[str, str | None]) -> T:
    """Config with the values of flags by key; None: the default. Errors name flags: `--top-k` is sampling.top_k."""
    try:
        return load_config(cls, None, [f"{key}={value}" for key, value in values.items() if value is not None])
    except UserError as error:
        raise UserError(KEY.sub(lambda match: f"--{match[1].replace('_', '-')}", str(error))) from error
