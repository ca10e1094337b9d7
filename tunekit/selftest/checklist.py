"""The checks of `tune selftest`, in the order in which they run. Imports nothing heavy: the parent process reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunekit.errors import UserError, did_you_mean

TOTAL_SECONDS = 175  # time limit of all checks together
START_SECONDS = 90  # time limit for starting a worker: on network file systems importing torch is slow
SYSTEM = "system.versions"
# Checks that always run. On a new machine the compiler would exceed the time limits of other checks.
ALWAYS = (SYSTEM, "kernels.compile")


@dataclass(frozen=True)
class Check:
    """An entry of FUNCTIONS of a module, under the last part of the name."""

    name: str  # group.check
    module: str  # in tunekit.selftest
    seconds: int  # time limit
    worker: str = "correctness"  # checks of the same worker share a process
    quick: bool = True  # whether --quick includes it

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]


CHECKS = (
    Check(SYSTEM, "system", 30),
    Check("kernels.compile", "system", 90),
    Check("kernels.glu", "kernel_checks", 40),
    Check("kernels.rms_norm", "kernel_checks", 40),
    Check("kernels.rope", "kernel_checks", 40),
    Check("kernels.linear", "kernel_checks", 20),
    Check("kernels.lora", "kernel_checks", 20),
    Check("kernels.cross_entropy", "kernel_checks", 40),
    Check("kernels.kl_divergence", "kernel_checks", 30),
    Check("kernels.adamw8bit", "kernel_checks", 30),
    Check("kernels.nf4", "kernel_checks", 40),
    Check("kernels.fp4", "kernel_checks", 40),
    Check("kernels.float8", "kernel_checks", 20),
    Check("kernels.gemv", "kernel_checks", 20),
    Check("kernels.attention", "kernel_checks", 30),
    Check("kernels.flex_attention", "kernel_checks", 60, quick=False),
    Check("kernels.gated_delta_rule", "kernel_checks", 20),
    Check("kernels.state_space", "kernel_checks", 20),
    Check("kernels.grouped_mm", "kernel_checks", 20),
    Check("model.packing", "model_checks", 30),
    Check("model.generation", "model_checks", 30),
    Check("model.resume", "model_checks", 60, quick=False),
    Check("speed.limits", "speed_checks", 25, worker="speed"),
    Check("speed.lora_step", "speed_checks", 90, worker="speed", quick=False),
    Check("speed.qlora_step", "speed_checks", 90, worker="speed", quick=False),
    Check("speed.full_step", "speed_checks", 90, worker="speed", quick=False),
    Check("processes.one_rank", "process_checks", 40, worker="processes", quick=False),
    Check("processes.several_ranks", "process_checks", 70, worker="processes", quick=False),
)


def select_checks(names: Sequence[str]) -> list[Check]:
    """The checks that `names` refer to, by name, last part or group; all of them if there are no names."""
    known = {name for check in CHECKS for name in (check.name, check.short_name, check.group)}
    for name in names:
        if name not in known:
            checks = f"Known checks: {', '.join(c.name for c in CHECKS)}"
            raise UserError(f"--only: no check '{name}'.{did_you_mean(name, sorted(known), checks)}")
    return [c for c in CHECKS if not names or not {c.name, c.short_name, c.group}.isdisjoint(names)]
