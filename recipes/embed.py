"""Embedding models: texts to vectors, from queries with documents that answer them or from pairs with a similarity.

tune run embed nano/embed
tune run embed my_embed.yaml model=Qwen/Qwen3-0.6B loss.scale=50 global_batch_size=1024 micro_batch_size=32
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer
from tunekit.checkpoint.classification_head import without_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.sentence_transformers import EmbeddingModules, choose_pooling
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.embedding_data import EmbeddingData, check_rows, read_text_options
from tunekit.data.embedding_datasets import Pooling
from tunekit.errors import FieldError
from tunekit.losses.embedding import EmbeddingFamily, MultipleNegativesRanking, gather_embeddings
from tunekit.losses.embedding_metrics import Embedder, evaluate_embeddings
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.run_context import RunContext, run_training
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.train_loop import TrainLoop


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(TrainConfig):
    """The keys of this recipe."""

    data: EmbeddingData  # Training rows: queries with documents, or pairs of texts with a similarity
    eval_data: EmbeddingData | None = None  # Held-out rows for evaluation during training
    loss: EmbeddingFamily = MultipleNegativesRanking()  # How similarities are trained
    # Tokens that an embedding comes from; `cls` is the first. null: as in an embedding model, else `lasttoken`
    pooling: Pooling | None = None
    normalize: bool = True  # Saved embeddings have norm 1. Losses use cosine similarities in any case

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel.tp > 1:
            raise FieldError("parallel.tp", "not supported by this recipe. Use parallel.dp_shard.")
        for key in ("forgetting", "generation_eval", "neftune_noise_alpha"):
            if getattr(self, key) is not None:
                raise FieldError(key, "not supported by this recipe. Remove it.")
        self.loss.check_datasets(self.data, self.eval_data)

    def with_head(self, checkpoint: HFCheckpoint) -> HFCheckpoint:
        """The checkpoint without a head, and the files with which sentence-transformers opens the result."""
        checkpoint = without_head(checkpoint)
        self.loss.check_dim(checkpoint.spec.dim)
        return replace(checkpoint, companions=self.modules(checkpoint).files())

    def modules(self, checkpoint: HFCheckpoint) -> EmbeddingModules:
        """Pooling, normalization and prompts of the result."""
        directories = self.adapter.adapter_path, checkpoint.tokenizer_path, checkpoint.path
        pooling = choose_pooling(self.pooling, *directories)
        max_length, prompts = read_text_options(self.data)
        return EmbeddingModules(checkpoint.spec.dim, pooling or "lasttoken", self.normalize, max_length, prompts)


CONFIG = EmbedConfig


def check(cfg: EmbedConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_training(cfg)
    check_rows(cfg.data, cfg.eval_data, cfg.global_batch_size)


def main(cfg: EmbedConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write a model for sentence-transformers to `final/` in the run directory."""
    run_training("embed", train, cfg, overwrite)


def train(cfg: EmbedConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    for loader in filter(None, (train_data, eval_data)):
        loader.add_check(cfg.loss.check_labels)
    with TrainLoop(run, checkpoint, tokenizer, (train_data, eval_data)) as loop:
        model = load_model(checkpoint, cfg, dist)
        embedder = Embedder(model, cfg.modules(checkpoint).pooling, dist)
        optimizer = build_optimizer(cfg, model, dist)
        # Resumes; between two steps it logs, evaluates, saves, uploads, rolls back or stops as the config says
        for step in loop.start(model, optimizer, partial(evaluate_embeddings, embedder, eval_data, cfg.loss)):
            loss = forward_backward(embedder, step.batches, cfg, train_data.mixture.docs_per_row)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not step.accepts(loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss, grad_norm)


def forward_backward(embedder: Embedder, batches: list[Batch], cfg: EmbedConfig, docs_per_row: int) -> Tensor:
    """Compute the gradients of one optimizer step. Returns the loss of its rows, over all ranks.

    Each micro-batch is embedded without gradients first, for the loss of all rows, and again to pass on the gradients
    of its embeddings (GradCache, arXiv:2101.06983).
    """
    dist, is_single = embedder.dist, len(batches) == 1  # a single micro-batch keeps its graph
    with torch.set_grad_enabled(is_single):
        embeddings = [embedder(batch, i) for i, batch in enumerate(batches)]
    step = gather_embeddings(embeddings, batches, docs_per_row, dist)
    loss, gradients = cfg.loss.with_gradient(step, dist)
    for i, (batch, gradient) in enumerate(zip(batches, gradients.split([*map(len, embeddings)]), strict=True)):
        dist.set_gradient_sync(embedder.model, enabled=i == len(batches) - 1)  # in the last micro-batch only
        output = embeddings[i] if is_single else embedder(batch, i)
        ((output * gradient).sum() * dist.grad_scale).backward()  # FSDP averages gradients; this makes it a sum
    return loss
