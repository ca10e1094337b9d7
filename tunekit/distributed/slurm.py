"""A run as a job of Slurm: a script in the run's folder, and `sbatch`. Nothing here imports torch."""

import difflib
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tunekit.distributed.launcher import LOGS, tune_command
from tunekit.errors import UserError

SCRIPT = f"{LOGS}/job.sh"  # below the folder of the run
NOTICE = 120  # seconds before the end of its time at which a run is asked to save
# Which port is free on the first node is known there alone; two jobs on one node differ in their numbers.
RENDEZVOUS = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TUNEKIT_RENDEZVOUS=$first:$((20000 + SLURM_JOB_ID % 10000))
"""
# What Slurm itself starts again goes on.
FRESH = ' $([ "${SLURM_RESTART_COUNT:-0}" = 0 ] && echo --overwrite)'
MEETING = ' --rdzv-endpoint "$TUNEKIT_RENDEZVOUS" --node-rank "$SLURM_NODEID"'
# Long options of sbatch (its manual, Slurm 25.05) that take a value, and those of pyxis, for containers. What is like
# none of them may be a site's own.
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
KNOWN = OPTIONS.split()
NEAR = 0.75


@dataclass(frozen=True)
class SlurmJob:
    """What is asked of Slurm: machines, GPUs on each, and any other option of `sbatch` by its long name."""

    nodes: int = 1
    gpus: int = 1
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "SlurmJob":
        """From `nodes=4,gpus=8,time=4:00:00,partition=x`. A comma within a value is written as `;`."""
        parts = (word.strip().partition("=") for word in text.split(",") if word.strip())
        words = {name: word for name, _, word in parts}
        for name, word in words.items():
            if not re.fullmatch(r"[a-z][a-z-]*", name) or not word or "\n" in word:
                raise UserError(f"--slurm {name}={word}: write name=value, such as nodes=4,gpus=8,time=4:00:00")
            if name not in (*KNOWN, *PLUGIN.split()) and (near := difflib.get_close_matches(name, KNOWN, 1, NEAR)):
                raise UserError(f"--slurm {name}={word}: sbatch has no --{name}; did you mean {near[0]}?")
            if name in ("nodes", "gpus") and not (word.isdecimal() and int(word) > 0):
                raise UserError(f"--slurm {name}={word}: give a number from 1 up")
        options = {name: word.replace(";", ",") for name, word in words.items() if name not in ("nodes", "gpus")}
        return cls(int(words.get("nodes", "1")), int(words.get("gpus", "1")), options)

    def script(self, words: tuple[str, ...], folder: Path, fresh: bool) -> str:
        """The batch script: one `tune run` on each node, which starts the ranks of that node."""
        log = folder.resolve() / LOGS / "slurm-%j.log"
        asks = {"job-name": folder.name, "nodes": self.nodes, "ntasks-per-node": 1, "gpus-per-node": self.gpus}
        asks |= {"output": log, "open-mode": "append", "signal": f"TERM@{NOTICE}"} | self.options
        asks = {name: ask for name, ask in asks.items() if ask != "none"}
        command = shlex.join([*tune_command(words), "--nproc-per-node", str(self.gpus)])
        command += FRESH if fresh else ""
        several = self.nodes > 1
        if several:
            command += f" --nnodes {self.nodes}{MEETING}"
        lines = ["#!/bin/bash", *(f"#SBATCH --{name}={ask}" for name, ask in asks.items()), "set -eu"]
        lines.append(f"cd {shlex.quote(str(Path.cwd()))}")
        lines += [RENDEZVOUS.rstrip()] if several else []
        return "\n".join([*lines, f"exec srun --kill-on-bad-exit=1 bash -c {shlex.quote(f'exec {command}')}\n"])

    def submit(self, words: tuple[str, ...], folder: Path, fresh: bool, dry: bool) -> str:
        """Write the script, hand it to Slurm unless `dry`, and say what was done."""
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        file = folder / SCRIPT
        file.write_text(self.script(words, folder, fresh))
        if dry:
            return f"written, not submitted: {file}"
        try:
            done = subprocess.run(["sbatch", file], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise UserError(f"--slurm: no sbatch on this machine; {file} is written: submit it from one") from None
        if done.returncode:
            raise UserError(f"--slurm: sbatch refused {file}: {' '.join(done.stderr.split())}")
        return f"{done.stdout.strip()}: {file}"
