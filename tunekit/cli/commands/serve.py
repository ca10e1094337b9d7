"""`tune serve`: a server with the protocol of OpenAI."""

import argparse
import importlib
import json
import os
from dataclasses import dataclass
from typing import Any

from tunekit import build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.model_dir import ModelDirs
from tunekit.data.chat_template.chat_format import with_chat_format
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.evaluation.inference_config import InferenceConfig, config_from_flags
from tunekit.generation.engine import GenerationEngine
from tunekit.hub import download
from tunekit.serving.adapter_set import AdapterSet, read_adapter

API_KEY_VARIABLE = "TUNEKIT_API_KEY"
DEFAULT_MAX_MODEL_LEN = 4096  # the cache of all rows is allocated at once


@dataclass(frozen=True, kw_only=True)
class ServeConfig(InferenceConfig):
    """Values of the flags about the model."""

    @staticmethod
    def from_args(args: argparse.Namespace) -> "ServeConfig":
        names = ("chat_template", "chat_template_kwargs", "config_overrides", "quantization")
        values = {"model": json.dumps(args.model), "precision.compute_dtype": args.dtype}
        values |= {name: getattr(args, name) for name in names}
        return config_from_flags(ServeConfig, values)

    def read_tokenizer(self, path: str, dirs: ModelDirs | None = None) -> Tokenizer:
        """Tokenizer of an adapter, whose chat template may be another one than that of the model."""
        tokenizer = build.resolve_model(path, download.SMALL, self.config_overrides, dirs)[2]
        return with_chat_format(tokenizer, self.chat_template, self.chat_template_kwargs)


def main(args: argparse.Namespace) -> None:
    """Load the model and its adapters, and serve until a signal."""
    app, server = import_server()
    cfg, adapters = ServeConfig.from_args(args), parse_adapters(args)
    checkpoint = check_model(cfg, adapters, args.allow_runtime_lora_updating)
    max_model_len = choose_max_model_len(args.max_model_len, checkpoint.spec.context)
    listener = server.bind_socket(args.host, args.port)
    dist = DistributedContext(cfg.sampling.seed, cfg.device, cfg.parallel)
    with dist:
        model, tokenizer = cfg.load_model(cfg.model, dist)
        adapter_set = AdapterSet(model, checkpoint)
        tokenizers: dict[str | None, Tokenizer] = {None: tokenizer}
        for name, path in adapters.items():
            adapter_set.load(name, path, cfg.model_dirs)
            tokenizers[name] = cfg.read_tokenizer(path, cfg.model_dirs)
        engine = GenerationEngine(model, args.max_num_seqs, max_model_len, dist, args.logprobs_mode)
        if args.api_key and not all(args.api_key):
            raise UserError("--api-key: must not be empty. Set the variable that it is read from.")
        limits = app.ServerLimits(
            api_keys=tuple(args.api_key or filter(None, [os.environ.get(API_KEY_VARIABLE)])),
            max_concurrent_requests=args.max_concurrent_requests,
            max_tokens=args.max_tokens,
            max_request_bytes=args.max_request_bytes,
        )
        name = args.served_model_name or args.model
        read_tokenizer = cfg.read_tokenizer if args.allow_runtime_lora_updating else None
        server.serve_requests(
            app.ModelServer(name, tokenizers, engine, adapter_set, limits, read_tokenizer), listener, args.host
        )


def import_server() -> tuple[Any, Any]:
    """The modules that require the packages of the extra."""
    try:
        return tuple(importlib.import_module(f"tunekit.serving.{name}") for name in ("app", "server"))  # pyright: ignore
    except ImportError as error:
        problem = f"requires the package {error.name}, which is not installed"
        raise UserError(f"tune serve: {problem}. Run: pip install 'tunekit[serve]'") from error


def parse_adapters(args: argparse.Namespace) -> dict[str, str]:
    """Paths of adapters by name."""
    adapters: dict[str, str] = {}
    for word in args.adapter:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise UserError(f"--adapter: must be NAME=PATH, got '{word}'. Write --adapter my-tools=runs/my-tools.")
        if name in adapters or name == (args.served_model_name or args.model):
            raise UserError(f"--adapter: two models have the name '{name}'. Use another name.")
        adapters[name] = path
    return adapters


def check_model(cfg: ServeConfig, adapters: dict[str, str], allows_lora_updates: bool) -> HFCheckpoint:
    """The checkpoint of the model. Raises UserError if it cannot be served with these adapters. Reads no weights."""
    cfg.check_model(cfg.model)
    checkpoint, model_adapter, _ = build.resolve_model(cfg.model, download.SMALL, cfg.config_overrides, cfg.model_dirs)
    if (adapters or allows_lora_updates) and isinstance(model_adapter, LoRAConfig):
        flag = "--adapter" if adapters else "--allow-runtime-lora-updating"
        raise UserError(f"{flag}: {cfg.model} is an adapter itself. Serve its base model, and both as --adapter.")
    for name, path in adapters.items():
        read_adapter(f"--adapter {name}={path}", path, checkpoint, cfg.model_dirs)
    return checkpoint


def choose_max_model_len(value: int | None, context: int) -> int:
    if value is not None and value > context:
        raise UserError(f"--max-model-len: must be <= {context}, the context length of the model, got {value}")
    return value or min(context, DEFAULT_MAX_MODEL_LEN)
