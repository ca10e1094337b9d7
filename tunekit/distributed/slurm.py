"""Submit a run as a Slurm job: writes a batch script and calls `sbatch`. Does not import torch."""

import difflib
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tunekit.distributed.launcher import LOGS, tune_command
from tunekit.errors import UserError

SCRIPT = f"{LOGS}/job.sh"  # in the output directory
NOTICE_SECONDS = 120  # seconds before the time limit at which Slurm sends SIGTERM, so that the run saves
# Free ports of the first node are not known in advance. Jobs on one node have different ids, hence different ports.
RENDEZVOUS_SCRIPT = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TUNEKIT_RENDEZVOUS=$first:$((20000 + SLURM_JOB_ID % 10000))
"""
# Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
STEP_CPUS = '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK'
CPU_OPTIONS = ("cpus-per-task", "cpus-per-gpu", "exclusive")
CPU_NOTE = (
    "\n--slurm: without cpus-per-task, Slurm may bind all ranks of a node to one core. "
    "Set it to the number of cores per node, such as cpus-per-task=64"
)
# Jobs that Slurm restarts resume.
OVERWRITE_FLAG = ' $([ "${SLURM_RESTART_COUNT:-0}" = 0 ] && echo --overwrite)'
RENDEZVOUS_FLAGS = ' --rdzv-endpoint "$TUNEKIT_RENDEZVOUS" --node-rank "$SLURM_NODEID"'
# Long options of sbatch (its manual, Slurm 25.05) that take a value, and those of pyxis, for containers. Other names
# may be options of a site, unless they are similar to one of these.
OPTIONS = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution error exclude exclusive export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill nodefile nodelist nodes ntasks
ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output oversubscribe partition power prefer
priority profile propagate qos reservation segment signal sockets-per-node switches thread-spec threads-per-core time
time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey
"""
PLUGIN = """
container-env container-image container-mounts container-name container-save container-workdir container-writable
"""
SBATCH_OPTIONS = OPTIONS.split()
MIN_SIMILARITY = 0.75


@dataclass(frozen=True)
class SlurmJob:
    """Number of nodes, GPUs per node, and other `sbatch` options by their long names."""

    nodes: int = 1
    gpus: int = 1
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "SlurmJob":
        """Parse `nodes=4,gpus=8,time=4:00:00,partition=x`. Write commas within values as `;`."""
        pairs = (value.strip().partition("=") for value in text.split(",") if value.strip())
        values = {name: value for name, _, value in pairs}
        for name, value in values.items():
            if not re.fullmatch(r"[a-z][a-z-]*", name) or not value or "\n" in value:
                raise UserError(f"--slurm {name}={value}: must be name=value, such as nodes=4,gpus=8,time=4:00:00")
            similar = difflib.get_close_matches(name, SBATCH_OPTIONS, 1, MIN_SIMILARITY)
            if similar and name not in (*SBATCH_OPTIONS, *PLUGIN.split()):
                raise UserError(f"--slurm {name}={value}: sbatch has no option --{name}. Did you mean '{similar[0]}'?")
            if name in ("nodes", "gpus") and not (value.isdecimal() and int(value) > 0):
                raise UserError(f"--slurm {name}={value}: must be a positive integer")
        options = {name: value.replace(";", ",") for name, value in values.items() if name not in ("nodes", "gpus")}
        return cls(int(values.get("nodes", "1")), int(values.get("gpus", "1")), options)

    def format_script(self, args: tuple[str, ...], output_dir: Path, overwrite: bool) -> str:
        """Batch script that runs one `tune run` per node, which starts the ranks of that node."""
        log = output_dir.resolve() / LOGS / "slurm-%j.log"
        options = {"job-name": output_dir.name, "nodes": self.nodes, "ntasks-per-node": 1, "gpus-per-node": self.gpus}
        options |= {"output": log, "open-mode": "append", "signal": f"TERM@{NOTICE_SECONDS}"} | self.options
        options = {name: value for name, value in options.items() if value != "none"}
        command = shlex.join([*tune_command(args), "--nproc-per-node", str(self.gpus)])
        command += OVERWRITE_FLAG if overwrite else ""
        is_multi_node = self.nodes > 1
        if is_multi_node:
            command += f" --nnodes {self.nodes}{RENDEZVOUS_FLAGS}"
        lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in options.items()), "set -eu"]
        lines += [STEP_CPUS, f"cd {shlex.quote(str(Path.cwd()))}"]
        lines += [RENDEZVOUS_SCRIPT.rstrip()] if is_multi_node else []
        return "\n".join([*lines, f"exec srun --kill-on-bad-exit=1 bash -c {shlex.quote(f'exec {command}')}\n"])

    def submit(self, args: tuple[str, ...], output_dir: Path, overwrite: bool, dry_run: bool) -> str:
        """Write the script and submit it unless `dry_run`. Returns a message."""
        (output_dir / LOGS).mkdir(parents=True, exist_ok=True)
        file = output_dir / SCRIPT
        file.write_text(self.format_script(args, output_dir, overwrite))
        note = "" if any(name in self.options for name in CPU_OPTIONS) else CPU_NOTE
        if dry_run:
            return f"written, not submitted: {file}{note}"
        try:
            process = subprocess.run(["sbatch", file], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            remedy = f"Submit {file} on a machine with Slurm"
            raise UserError(f"--slurm: sbatch not found on this machine. {remedy}") from None
        if process.returncode:
            raise UserError(f"--slurm: sbatch refused {file}: {' '.join(process.stderr.split())}")
        return f"{process.stdout.strip()}: {file}{note}"
