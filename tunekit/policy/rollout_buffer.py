"""The samples that the optimizer steps of a generation train on."""

from typing import Any, ClassVar

from torch import Tensor

from tunekit.policy.config import PolicyConfig
from tunekit.policy.samples import PolicySamples


class RolloutBuffer:
    """The samples of a generation, from the first step that trains on them to the last.

    Saved in training states: a run that resumes in the middle of a generation trains on the same samples.
    """

    samples_class: ClassVar[type[PolicySamples]] = PolicySamples

    def __init__(self, cfg: PolicyConfig) -> None:
        self.cfg = cfg
        self.generation = -1  # number of the generation; -1: none
        self.samples: PolicySamples | None = None
        self.metrics: dict[str, float] = {}  # of the generation

    def needs_rollouts(self, data_step: int) -> bool:
        """Whether a step has no samples yet."""
        return self.samples is None or self.generation != data_step // self.cfg.steps_per_prompt

    def fill(self, data_step: int, samples: PolicySamples, metrics: dict[str, float]) -> None:
        """Store the samples and metrics of the generation of a step."""
        self.generation = data_step // self.cfg.steps_per_prompt
        self.samples, self.metrics = samples, metrics

    def take(self, data_step: int) -> tuple[PolicySamples, float]:
        """Samples of a step, and the mean number of trained tokens per step of its generation.

        After the last step of a generation, the buffer is empty.
        """
        assert self.samples is not None
        cfg, samples = self.cfg, self.samples
        position = data_step % cfg.steps_per_prompt
        if position == cfg.steps_per_prompt - 1:
            self.samples = None
        mean_num_tokens = float(samples.num_tokens.sum()) / cfg.steps_per_generation
        return samples[self.rows(position)], mean_num_tokens

    def rows(self, position: int) -> slice | Tensor:
        """Indices of the samples of a step, by its position in the generation."""
        first = position % self.cfg.steps_per_generation * self.cfg.global_batch_size
        return slice(first, first + self.cfg.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        samples = None if self.samples is None else self.samples.state_dict()
        return {"generation": self.generation, "samples": samples, "metrics": self.metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generation, self.metrics = state["generation"], dict(state["metrics"])
        self.samples = None if state["samples"] is None else self.samples_class.from_state_dict(state["samples"])
