"""The limit on the difference between the log-probabilities of sampling and training."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.kernels.device_tensors import HostCopy
from tunekit.loggers.metric_logger import MetricLogger
from tunekit.policy.config import PolicyConfig
from tunekit.policy.engine_config import NativeEngineConfig

DEFAULT_LIMIT = 0.2
METRIC = "sampling/logprob_diff"


class DriftLimit:
    """Ends a run whose log-probabilities of sampling and training differ. All ranks decide the same.

    The largest difference so far stays on the device. That of the step before is read with the metrics, and all are
    read before weights are saved or evaluated. On the CPU, each step is read at once.
    """

    def __init__(self, cfg: PolicyConfig, dist: DistributedContext) -> None:
        is_native = isinstance(cfg.engine, NativeEngineConfig)
        # The correction is for rounding. On a server, a larger difference is one of weights, tokens or temperature.
        default = None if cfg.loss.importance_sampling_correction and is_native else DEFAULT_LIMIT
        self.limit = default if cfg.max_logprob_drift is None else cfg.max_logprob_drift
        correction = "set loss.importance_sampling_correction=true"
        self.advice = correction if is_native else "start vLLM with --logprobs-mode processed_logprobs"
        self.largest = torch.zeros(1, device=dist.device)
        self.copy = HostCopy(self.largest)
        self.reads_now = dist.device.type == "cpu"

    def add(self, metrics: Mapping[str, Tensor | float], logger: MetricLogger) -> None:
        """Note the difference of a step. Raises UserError if the limit is exceeded, as far as it is known."""
        if logger.pending:
            self.check()
        self.largest = torch.maximum(self.largest, torch.as_tensor(metrics[METRIC]).nan_to_num(0))
        self.copy = HostCopy(self.largest)
        if self.reads_now:
            self.check()

    def check(self) -> None:
        """Raise UserError if a step has exceeded the limit. Waits for the device."""
        if self.limit is not None and (drift := self.copy.read()[0]) > self.limit:
            raise UserError(
                f"max_logprob_drift: the log-probabilities of sampling and training differ by {drift:.3g} on average, "
                f"more than {self.limit:g}. Use the same dtypes for both, raise it, or {self.advice}."
            )
