"""Rollouts of a generation as tensors to train on, and their micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.packing import pack_rows
from tunekit.data.dataloader.sampler import unit_documents
from tunekit.data.dataloader.shared_prefix import dataset_row_lengths
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.rollouts.rollout import Rollout


@dataclass(frozen=True)
class PolicySamples:
    """N sequences of at most T tokens, padded on the right. Tensors are (N, T); answers to one prompt are adjacent.

    The same on all ranks. Log-probabilities and advantages are fp32, and 0 for tokens that are not trained.
    """

    tokens: Tensor  # int32
    loss_mask: Tensor  # bool, sampled tokens
    lengths: Tensor  # (N,) int64
    sampling_logps: Tensor  # reported by the generation engine
    advantages: Tensor
    old_logps: Tensor  # of the model in training before the first update; NaN: those of the current forward pass
    ref_logps: Tensor  # of the reference model

    @staticmethod
    def from_rollouts(rollouts: Sequence[Rollout], mask_truncated: bool) -> "PolicySamples":
        """Samples without advantages. With `mask_truncated`, rollouts that a limit cut off have no trained tokens."""
        lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
        shape = len(rollouts), int(lengths.max())
        tokens, mask, logps = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape).bool(), torch.zeros(shape)
        for row, rollout in enumerate(rollouts):
            end, is_dropped = len(rollout.tokens), mask_truncated and rollout.finish_reason == "length"
            tokens[row, :end] = torch.from_numpy(np.asarray(rollout.tokens, np.int32))
            mask[row, :end] = torch.from_numpy(np.asarray(rollout.loss_mask, bool) & (not is_dropped))
            logps[row, :end] = torch.from_numpy(np.asarray(rollout.logprobs, np.float32))
        zeros = torch.zeros(shape)
        return PolicySamples(tokens, mask, lengths, logps, zeros, torch.full(shape, torch.nan), zeros)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return replace(self, **{name: value[rows] for name, value in vars(self).items()})

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()})

    @property
    def num_tokens(self) -> Tensor:
        """Number of trained tokens of each sequence, (N,) fp32."""
        return self.loss_mask.sum(1).float()

    @property
    def documents(self) -> TokenizedDataset:
        """The sequences as documents of a data loader."""
        tokens, masks = self.tokens.numpy(), self.loss_mask.numpy()
        return TokenizedDataset.from_documents(
            [Document(tokens[i, :n], masks[i, :n], n) for i, n in enumerate(self.lengths.tolist())]
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values: tensors of a training state must have the same shape in each run."""
        arrays = {name: value.numpy() for name, value in vars(self).items()}
        return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        arrays = {
            item.name: np.frombuffer(state[item.name][2], state[item.name][0]).reshape(state[item.name][1])
            for item in fields(cls)
        }
        return cls(**{name: torch.from_numpy(array.copy()) for name, array in arrays.items()})


@dataclass(frozen=True)
class PolicyCollator:
    """Micro-batches of samples. Packed rows hold whole sequences; those of a group store their prompt once."""

    collator: Collator  # `capacity`: tokens of a packed row; None: each sequence is a padded row
    num_generations: int
    can_share_prefixes: bool  # whether the model reads a prompt that another sequence stores

    def micro_batches(self, samples: PolicySamples) -> list[Batch]:
        """Micro-batches of this rank. All ranks have the same number."""
        documents = samples.documents
        if self.collator.capacity is None:
            return self.collator.micro_batches(documents, list(np.arange(len(samples))[:, None]))
        size, lengths = self.unit_size(documents, self.collator.capacity)
        plan = pack_rows(lengths, self.collator.capacity)
        rows = unit_documents(plan.rows(0, len(plan)), size)
        collator = replace(self.collator, docs_per_row=size, share_prefixes=size > 1)
        return collator.micro_batches(documents, rows)

    def unit_size(self, documents: TokenizedDataset, capacity: int) -> tuple[int, np.ndarray]:
        """Number of adjacent sequences that share their prompt in a packed row, and the tokens of each such unit.

        The largest divisor of the group size for which all units fit into a row.
        """
        divisors = [n for n in range(self.num_generations, 1, -1) if self.num_generations % n == 0]
        for size in divisors if self.can_share_prefixes else ():
            lengths = dataset_row_lengths(documents, size, share_prefixes=True)
            if lengths.max() <= capacity:
                return size, lengths
        return 1, documents.lengths
