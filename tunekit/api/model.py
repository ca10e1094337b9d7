"""A loaded model with its tokenizer: a `torch.nn.Module` that answers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.api.session import api_call, isolated_torch
from tunekit.api.values import PlainValues
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.config.load import load_config
from tunekit.config.overrides import KeywordValues
from tunekit.data.chat_template.chat_format import encode_conversation, with_chat_format
from tunekit.data.chat_template.messages import Message
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.evaluation.inference_config import InferenceConfig
from tunekit.generation.generate import check_prompt_length, generate_answers, stream_text
from tunekit.generation.sampling import CHAT_SAMPLING, SamplingConfig
from tunekit.hub import download
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.recipes.generate import GenerateConfig
from tunekit.rollouts.prompts import check_prompt_lengths, encode_prompts, read_prompts

Conversation = Sequence[Mapping[str, Any]]  # messages with `role` and `content`


class SamplingOptions(TypedDict, total=False):
    """How answers are sampled: the keys `sampling` of recipe `generate`."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    stop_strings: Sequence[str]
    max_new_tokens: int
    seed: int


class Model(nn.Module):
    """A model with its tokenizer. The submodule `decoder` has the weights; `name` is what `load` has opened.

    Modules, parameters, `state_dict()`, hooks and `to()` are those of torch. A new model is in eval mode.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        checkpoint: HFCheckpoint,
        config: InferenceConfig,
        adapter: str | None = None,
    ) -> None:
        super().__init__()
        self.decoder, self.tokenizer, self.checkpoint = decoder, tokenizer, checkpoint
        self.config, self.adapter = config, adapter
        self._loaded_versions = weight_versions(self)

    @property
    def name(self) -> str:
        """Directory or name that was loaded."""
        return self.config.model

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def forward(self, tokens: Tensor, positions: Tensor | None = None, layout: SequenceLayout | None = None) -> Tensor:
        """Logits (B, S, vocab) of token ids (B, S), or scores (B, S, labels) of a reward model or a classifier.

        `positions` (B, S) and `layout` describe packed documents.
        """
        return self.decoder(tokens, positions, layout)

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]  # a text is a sequence of texts, too
        self, prompts: str, *, system_prompt: str | None = None, apply_chat_template: bool = True,
        max_num_seqs: int = 16, **sampling: Unpack[SamplingOptions]
    ) -> str: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Conversation], *, system_prompt: str | None = None,
        apply_chat_template: bool = True, max_num_seqs: int = 16, **sampling: Unpack[SamplingOptions]
    ) -> list[str]: ...  # fmt: skip

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Conversation],
        *,
        system_prompt: str | None = None,
        apply_chat_template: bool = True,
        max_num_seqs: int = 16,
        **sampling: Unpack[SamplingOptions],
    ) -> str | list[str]:
        """The answer to a prompt, or to each of several, of which `max_num_seqs` are answered at once.

        A prompt is a question, the messages of a conversation, or, without `apply_chat_template`, a text to continue.
        Greedy, with at most 256 new tokens, unless `sampling` says otherwise. Equals `tune run generate`.
        """
        where, texts = "generate(...)", [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            return []
        with api_call(where):
            keys = {"system_prompt": system_prompt, "apply_chat_template": apply_chat_template}
            keys |= {"max_num_seqs": max_num_seqs, "sampling": dict(sampling), "model": self.name}
            keys["prompts"] = [text if isinstance(text, str) else "" for text in texts]
            cfg = load_config(GenerateConfig, None, keywords=KeywordValues(where, PlainValues(where)(keys)))
            with inference(self) as dist:
                rows = encode_all(self, cfg, texts)
                answers = generate_answers(self.decoder, self.tokenizer, rows, cfg.sampling, max_num_seqs, dist)
        return answers[0].answer if isinstance(prompts, str) else [answer.answer for answer in answers]

    def chat(
        self,
        messages: str | Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> str:
        """The answer to a question, or to a conversation, with the defaults of `tune chat`.

        temperature 0.7, top_p 0.95 and at most 1,024 new tokens. `tools` are JSON schemas of functions.
        """
        where = "chat(...)"
        with api_call(where):
            values = KeywordValues(where, PlainValues(where)(dict(sampling)))
            options = load_config(SamplingConfig, asdict(CHAT_SAMPLING), keywords=values)
            conversation = read_messages(messages, "messages")
            schemas = None if tools is None else [dict(tool) for tool in tools]
            with inference(self):
                return "".join(stream_text(self.decoder, self.tokenizer, conversation, options, schemas))


def encode_all(model: Model, cfg: GenerateConfig, prompts: Sequence[Any]) -> list[list[int]]:
    """Token ids of prompts."""
    if all(isinstance(prompt, str) for prompt in prompts):
        rows = encode_prompts(cfg, read_prompts(cfg), model.tokenizer)
        check_prompt_lengths(rows, model.decoder.spec.context)
        return [list(row.tokens) for row in rows]
    system = [] if cfg.system_prompt is None else [{"role": "system", "content": cfg.system_prompt}]
    conversations = [read_messages(prompt, f"prompts.{i}") for i, prompt in enumerate(prompts)]
    rows = [encode_conversation(model.tokenizer, [*system, *messages]) for messages in conversations]
    for index, row in enumerate(rows):
        check_prompt_length(f"prompts.{index}", len(row), model.decoder.spec.context)
    return rows


@contextmanager
def inference(model: Model) -> Iterator[DistributedContext]:
    """Generate in eval mode with the precision that was loaded. The mode, and switches of torch, are restored."""
    require_language_model(model.checkpoint, model.name)
    was_training = model.training
    with isolated_torch(model.device):
        model.config.precision.set_matmul_precision(model.device)
        model.eval()
        try:
            yield DistributedContext(device=model.device.type)
        finally:
            model.train(was_training)


def weight_versions(model: nn.Module) -> list[int]:
    """Version of each parameter, which torch raises at each change; 0 of those that cannot be changed."""
    return [0 if parameter.is_inference() else parameter._version for parameter in model.parameters()]


def is_changed(model: Model) -> bool:
    """Whether weights have changed in memory since they were loaded, as an optimizer changes them."""
    return weight_versions(model) != model._loaded_versions


def read_messages(messages: Any, where: str) -> list[Message]:
    """The messages of a conversation. Raises UserError for anything else."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    items = list(messages) if isinstance(messages, Sequence) else [messages]
    for index, message in enumerate(items):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            problem = "expected a dict with `role` and `content`"
            raise UserError(f"{where}.{index}: {problem}, got {type(message).__name__}. Pass a text, or messages.")
    if not items:
        raise UserError(f"{where}: is empty. Pass at least one message.")
    return [dict(message) for message in items]


def load(
    name: str | os.PathLike[str],
    *,
    quantization: str | Mapping[str, Any] = "none",
    adapter: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    **keys: Any,
) -> Model:
    """Load a model: a name on the Hub, a directory of a model, an adapter or a run, or `tunekit/nano`.

    `quantization`: how the weights are stored, such as "nf4". `adapter`: an adapter on top of the model. `dtype`: of
    activations and matmuls, "bf16" or `torch.bfloat16`. `keys` are those of recipe `generate` that describe a model:
    chat_template, chat_template_kwargs, config_overrides and precision.
    """
    where = "load(...)"
    with api_call(where):
        values = {"model": name, "quantization": quantization, "device": device, **keys}
        if dtype != "auto":
            values["precision.compute_dtype"] = dtype
        cfg = load_config(InferenceConfig, None, keywords=KeywordValues(where, PlainValues(where)(values)))
        return load_configured(cfg, None if adapter is None else os.fspath(adapter))


def load_configured(cfg: InferenceConfig, adapter: str | None = None) -> Model:
    """The model that a config describes, in eval mode, with an adapter on top of it."""
    dist = DistributedContext(device=cfg.device)
    with isolated_torch(dist.device):
        checkpoint, adapter_config, tokenizer = resolve_model(cfg, adapter)
        tokenizer = with_chat_format(tokenizer, cfg.chat_template, cfg.chat_template_kwargs)
        options = cfg.quantization, adapter_config, cfg.precision, MemoryConfig(), dist
        decoder = build.build_model(checkpoint, *options)
        adapter_path = None if adapter is None else adapter_config.adapter_path
        return Model(decoder, tokenizer, checkpoint, cfg, adapter_path).eval()


def resolve_model(cfg: InferenceConfig, adapter: str | None) -> tuple[HFCheckpoint, NoAdapter | LoRAConfig, Tokenizer]:
    """Checkpoint, adapter and tokenizer of a model, and of the adapter on top of it."""
    checkpoint, config, tokenizer = build.resolve_model(cfg.model, download.READ, cfg.config_overrides, cfg.model_dirs)
    if adapter is None:
        return checkpoint, config, tokenizer
    if config.adapter_path is not None:
        raise UserError(f"adapter: {cfg.model} is an adapter itself. Load its base, {checkpoint.name}, with one.")
    path = build.final_dir_of(download.resolve_model_dir(adapter, download.READ))
    if not AdapterDir.is_adapter(path):
        raise UserError(f"adapter: {adapter} is not an adapter. Load it as a model.")
    directory = cfg.model_dirs.open(AdapterDir, path)
    checkpoint = peft_adapter.with_adapter_config(directory, checkpoint)
    if directory.has_tokenizer:
        checkpoint = replace(checkpoint, tokenizer_dir=directory)
    return checkpoint, peft_adapter.read_adapter_config(directory, checkpoint), build.open_tokenizer(checkpoint)
