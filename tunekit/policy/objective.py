"""The policy gradient of an optimizer step: log-probabilities of samples, the loss, and its metrics."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.kernels.cross_entropy import token_logps_and_entropies
from tunekit.losses.cross_entropy import local_targets
from tunekit.losses.policy_gradient import PolicyGradientLoss, PolicyTokens, StepCounts
from tunekit.models.decoder import Decoder, Head
from tunekit.policy.config import PolicyConfig
from tunekit.policy.prompt_loader import PromptLoader
from tunekit.policy.samples import PolicyCollator, PolicySamples
from tunekit.training.reference_model import ReferenceModel


@dataclass(frozen=True)
class PolicyStep:
    """Samples of an optimizer step on the device, the micro-batches of this rank, and what the step has in common."""

    samples: PolicySamples
    batches: list[Batch]
    weights: Tensor  # (N,), of the tokens of each sequence
    sums: dict[str, Tensor]  # sums (N,) over the tokens of each sequence on this rank, by metric
    min_entropy: Tensor | None = None  # tokens with a lower entropy have no policy loss


@dataclass(frozen=True)
class PolicyObjective:
    """A policy gradient loss with the sampling temperature, by which logits are divided."""

    loss: PolicyGradientLoss
    collator: PolicyCollator
    temperature: float
    max_completion_length: int
    dist: DistributedContext
    reference: ReferenceModel | None = None  # if the loss has a KL divergence
    num_outputs: ClassVar[int] = 2  # of `read_tokens`

    def begin_step(self, model: Decoder, samples: PolicySamples, mean_num_tokens: float) -> PolicyStep:
        """Prepare an optimizer step. `mean_num_tokens`: trained tokens per step of the generation."""
        num_tokens = samples.num_tokens
        counts = StepCounts(len(samples), int(num_tokens.sum()), mean_num_tokens, self.max_completion_length)
        weights = self.loss.document_weights(num_tokens, counts).to(self.dist.device)
        batches = self.collator.micro_batches(samples)
        step = PolicyStep(samples.to(self.dist.device), batches, weights, {})
        if self.loss.top_entropy_quantile == 1:
            return step
        entropies = self.score(model, samples)[1][samples.loss_mask]
        threshold = quantile(entropies, 1 - self.loss.top_entropy_quantile).to(self.dist.device)
        return replace(step, min_entropy=threshold)

    def token_loss(self, model: Decoder, batch: Batch, step: PolicyStep) -> Tensor:
        """Contribution of a micro-batch on this rank to the loss of the step. Adds its metrics to the step."""
        samples, batch = step.samples, batch.to(model.device)
        outputs, index, position = self.token_outputs(model, batch)
        tokens = self.gather_tokens(model, outputs, samples, (index, position))
        losses, metrics = self.loss(tokens, step.min_entropy)
        losses = losses * step.weights[index]
        for name, values in {"loss": losses.detach(), **metrics}.items():
            total = step.sums.setdefault(name, step.weights.new_zeros(len(samples)))
            total.index_add_(0, index, values.float())
        return losses.sum()

    def gather_tokens(
        self, model: Decoder, outputs: Tensor, samples: PolicySamples, where: tuple[Tensor, Tensor]
    ) -> PolicyTokens:
        """The tokens of a micro-batch, with `outputs` of the model and with values of their sample and position."""
        old_logps, logps = samples.old_logps[where], outputs[0]
        return PolicyTokens(
            logps,
            outputs[1].detach(),
            samples.sampling_logps[where],
            torch.where(old_logps.isnan(), logps.detach(), old_logps),
            samples.ref_logps[where],
            samples.advantages[where],
            where[0],
            len(samples),
            model.cp_sharding.all_reduce_sum,
        )

    def read_tokens(self, model: Decoder, hidden: Tensor, targets: Tensor, head: Head, rows: Tensor) -> list[Tensor]:
        """Outputs (n,) of the model for selected rows of hidden states: log-probabilities of targets, and entropies."""
        return [*token_logps_and_entropies(hidden, targets, head, rows, self.temperature)]

    def token_outputs(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs (k, n) of `read_tokens` for the trained tokens on this rank, and their sample and position."""
        (targets, rows), local = local_targets(model, batch), model.cp_sharding.local_tokens
        documents, positions = local(batch.documents.ids, -1).flatten(), local(batch.positions).flatten()

        def read(hidden: Tensor, head: Head) -> Tensor:
            return torch.stack(self.read_tokens(model, hidden.flatten(0, 1), targets, head, rows))

        outputs = model(batch.tokens, batch.positions, batch.layout, head_fn=read, sharded=True)
        return outputs, batch.documents.indices[documents[rows]], positions[rows] + 1

    @torch.no_grad()
    def score(self, model: Decoder, samples: PolicySamples) -> Tensor:
        """Outputs (k, N, T) of `read_tokens` for all samples under current weights, on the host of all ranks."""
        was_training = model.training
        model.eval()
        tables = torch.zeros(self.num_outputs, *samples.tokens.shape, device=self.dist.device)
        for batch in self.collator.micro_batches(samples):
            outputs, index, position = self.token_outputs(model, batch.to(self.dist.device))
            tables[: len(outputs), index, position] = outputs
        model.train(was_training)
        return self.dist.all_reduce_sum(tables).cpu()

    def score_reference(self, samples: PolicySamples) -> Tensor:
        """Log-probabilities (N, T) of samples under the reference, on the host of all ranks."""
        assert self.reference is not None
        with self.reference.use():
            return self.score(self.reference.model, samples)[0]

    def metrics(self, step: PolicyStep) -> dict[str, Tensor]:
        """Loss and mean metrics of a step under TRL's names, over all ranks."""
        names = sorted(step.sums)
        sums = dict(zip(names, self.dist.all_reduce_sum(torch.stack([step.sums[name] for name in names])), strict=True))
        num_tokens = step.samples.num_tokens
        metrics = {"loss": sums.pop("loss").sum()}
        per_sequence = {name: values / num_tokens for name, values in sums.items()}  # NaN without trained tokens
        for name, values in sums.items():
            clips_sequences = self.loss.is_sequence_level and "clip" in name
            metrics[name] = per_sequence[name].nanmean() if clips_sequences else values.sum() / num_tokens.sum()
        for name, extreme in (("clip_ratio/low", "min"), ("clip_ratio/high", "max")):
            if name in metrics:
                values = per_sequence[name]
                bound = (
                    values.nan_to_num(torch.inf).amin() if extreme == "min" else values.nan_to_num(-torch.inf).amax()
                )
                metrics |= {f"{name}_mean": metrics.pop(name), f"{name}_{extreme}": bound}
        if "clip_ratio/low_mean" in metrics:
            metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
        return metrics


def open_objective(
    cfg: PolicyConfig,
    data: PromptLoader,
    model: Decoder,
    reference: ReferenceModel | None,
    dist: DistributedContext,
    kind: type[PolicyObjective] = PolicyObjective,
) -> PolicyObjective:
    """The objective of a run. With `data.packing`, the answers to a prompt share it where the model supports that."""
    max_length = data.mixture.max_length
    collator = replace(
        data.collator,
        global_batch_size=cfg.global_batch_size,
        micro_batch_size=cfg.micro_batch_size,
        capacity=max_length if cfg.data.packing else None,
        with_document_ids=True,
    )
    policy_collator = PolicyCollator(collator, cfg.num_generations, model.shares_prefixes(max_length))
    return kind(cfg.loss, policy_collator, cfg.sampling.temperature, cfg.sampling.max_new_tokens, dist, reference)


def quantile(values: Tensor, q: float) -> Tensor:
    """Quantile with linear interpolation, also of more than 2^24 values; infinity of none."""
    if not len(values):
        return torch.tensor(torch.inf)
    position = q * (len(values) - 1)
    low = int(position)
    ordered = values.sort().values
    return ordered[low].lerp(ordered[min(low + 1, len(values) - 1)], position - low)
