"""Choice of the engine that generates the answers: in this process, or a server."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.build import open_checkpoint
from tunekit.config.base_url import check_base_url
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, check_range
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.rollout_engine import RolloutEngine
from tunekit.models.decoder import Decoder
from tunekit.rollouts.openai_client import MAX_RESPONSE_BYTES, OpenAIClient
from tunekit.rollouts.served_model import ServedAdapter, ServedModel
from tunekit.rollouts.server_engine import ServerEngine
from tunekit.training.config import TrainConfig

ADAPTERS_DIR = "rollout_adapters"  # in the run directory
CHECK_PROMPT = [1]  # answered once before training


@dataclass(frozen=True)
class BaseEngineConfig(ABC):
    """Where answers are generated."""

    def check(self, adapter: NoAdapter | LoRAConfig) -> None:
        """Raise FieldError if the engine cannot follow the training of this adapter."""
        return

    @abstractmethod
    def open(
        self, cfg: TrainConfig, model: Decoder, max_num_seqs: int, max_model_len: int, dist: DistributedContext
    ) -> RolloutEngine:
        """The engine of a model in training. See `RolloutEngine` for the limits."""


@dataclass(frozen=True)
class NativeEngineConfig(BaseEngineConfig):
    """The model in training, between the optimizer steps: no copies of the weights, and the same probabilities."""

    kind: ClassVar[str] = "native"

    def open(
        self, cfg: TrainConfig, model: Decoder, max_num_seqs: int, max_model_len: int, dist: DistributedContext
    ) -> RolloutEngine:
        return GenerationEngine(model, max_num_seqs, max_model_len, dist)


@dataclass(frozen=True)
class ServerEngineConfig(BaseEngineConfig):
    """A server with the OpenAI protocol that returns token ids, such as vLLM or `tune serve`."""

    kind: ClassVar[str] = "server"
    base_url: str  # Address of the server, such as `http://localhost:8000/v1`
    model: str | None = None  # Name of the base model on the server; null: that of the config
    # How new weights reach the server. `lora`: it loads the adapter from a directory before each generation (vLLM with
    # --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True). `none`: its weights do not change
    sync: Literal["lora", "none"] = "lora"
    adapter_dir: str | None = None  # Directory for these adapters, which the server can read; null: output_dir
    api_key_env: str = "VLLM_API_KEY"  # Environment variable with the API key, which may be unset
    timeout_seconds: float = 600.0  # Longest time of a request, from the connection to the last byte of the response
    max_response_bytes: int = MAX_RESPONSE_BYTES  # Size of a response
    max_retries: int = 8  # Repetitions of a request after an error of the server or of the network

    def __post_init__(self) -> None:
        check_base_url(self.base_url)
        check_range(self, "timeout_seconds", "max_response_bytes", gt=0)
        check_range(self, "max_retries", ge=0)

    def check(self, adapter: NoAdapter | LoRAConfig) -> None:
        if self.sync == "lora" and not isinstance(adapter, LoRAConfig):
            raise FieldError(
                "engine.sync", "lora needs an adapter, got adapter=none. Set adapter=lora or engine=native."
            )

    def open(
        self, cfg: TrainConfig, model: Decoder, max_num_seqs: int, max_model_len: int, dist: DistributedContext
    ) -> RolloutEngine:
        """Raises UserError if the server is not reachable, or does not answer with token ids."""
        checkpoint = open_checkpoint(cfg)
        name = self.model or checkpoint.name
        has_path = urlsplit(self.base_url).path.strip("/")
        url = self.base_url if has_path else f"{self.base_url.rstrip('/')}/v1"  # TRL's addresses have no path
        limits = self.timeout_seconds, self.max_retries, self.max_response_bytes
        client = OpenAIClient("engine", url, self.api_key_env, *limits)
        if self.sync == "none":
            served = ServedModel(client, name)
        else:
            assert isinstance(cfg.adapter, LoRAConfig)
            directory = Path(self.adapter_dir or Path(cfg.output_dir, ADAPTERS_DIR))
            served = ServedAdapter(client, name, directory, cfg.adapter, checkpoint, dist)
        engine = ServerEngine(served, model, max_num_seqs, max_model_len, dist)
        engine.check(CHECK_PROMPT)
        return engine


EngineChoice = NativeEngineConfig | ServerEngineConfig
