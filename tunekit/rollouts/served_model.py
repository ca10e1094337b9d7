"""The name of the model in training on a server, and how its new weights reach the server."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Any

from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import atomic, peft_adapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.rollouts.adapter_cleanup import AdapterCleanup
from tunekit.rollouts.completion import parse_models
from tunekit.rollouts.openai_client import OpenAIClient, ResponseError, shorten_text

LOAD_HINT = (
    "The server must be able to read the directory, and load adapters: vLLM with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, tune serve with --allow-runtime-lora-updating."
)


@dataclass
class ServedModel:
    """A model whose weights never change. `name` is that in requests."""

    client: OpenAIClient
    name: str

    def update(self, model: Decoder) -> None:
        """Send the weights to the server. Collective."""

    def restore(self) -> None:
        """Send the weights again to a server that has lost them. Raises UserError if it does not know the model."""
        names = ", ".join(entry["id"] for entry in list_models(self.client))
        raise self.client.error(f"{self.name!r} is not one of the models of the server: {shorten_text(names)}")

    def release(self) -> None:
        """Remove the weights, which are outdated, from the server. Collective."""

    def close(self) -> None:
        """Remove the weights from the server after an error. Not collective."""

    def check(self, max_model_len: int) -> None:
        """Raise UserError if the server is not reachable, lacks the model, or has a shorter context."""
        entries = list_models(replace(self.client, max_retries=0))
        entry = next((entry for entry in entries if entry["id"] == self.name), None)
        if entry is None:
            ServedModel.restore(self)
        elif isinstance(limit := entry.get("max_model_len"), int) and limit < max_model_len:
            problem = f"the context of {self.name!r} has {limit:,} tokens, but data.max_length is {max_model_len:,}"
            raise self.client.error(f"{problem}: start it with a longer one, or lower data.max_length")


@dataclass
class ServedAdapter(ServedModel):
    """An adapter that the server loads from a directory, as vLLM does. Each version has a name of its own.

    The name of the base model is replaced by that of the adapter while there is one.
    """

    directory: Path  # that the server can read
    adapter: LoRAConfig
    checkpoint: HFCheckpoint
    dist: DistributedContext
    version: int = 0
    lock: Lock = field(default_factory=Lock)
    cleanup: AdapterCleanup | None = None  # on the main process, while the server has an adapter

    def __post_init__(self) -> None:
        self.prefix = self.dist.run_on_main(lambda: f"tunekit-{token_hex(4)}")  # other runs may use the same server

    @property
    def path(self) -> Path:
        """Directory of the current version."""
        return self.directory.resolve() / self.name

    def update(self, model: Decoder) -> None:
        self.version += 1
        self.name = f"{self.prefix}-v{self.version}"
        with atomic.AtomicDir(self.path, self.dist) as directory:
            peft_adapter.save_adapter(directory, model, self.adapter, self.checkpoint, self.dist)
        self.dist.run_on_main(self.load_first)

    def load_first(self) -> None:
        """Load a new version, which the cleanup removes."""
        self.cleanup = AdapterCleanup(self.client, self.name, self.path)
        self.load()

    def load(self) -> None:
        try:
            self.client.request("load_lora_adapter", {"lora_name": self.name, "lora_path": str(self.path)})
        except UserError as error:
            raise UserError(f"{error} {LOAD_HINT}") from None

    def restore(self) -> None:
        with self.lock:  # one of the threads whose requests have failed loads it
            if not self.is_loaded():
                try:
                    self.load()
                except UserError:
                    if not self.is_loaded():  # by another rank
                        raise

    def is_loaded(self) -> bool:
        return self.name in (entry["id"] for entry in list_models(self.client))

    def release(self) -> None:
        self.dist.barrier()
        self.dist.run_on_main(self.close)

    def close(self) -> None:
        if self.cleanup is not None:
            self.cleanup.finish()
            self.cleanup = None


def list_models(client: OpenAIClient) -> list[dict[str, Any]]:
    """Models of a server, adapters too, each with its name as `id`. Raises UserError."""
    try:
        return parse_models(client.request("models"))
    except ResponseError as error:
        raise client.error(f"/models: {error}") from None
