"""Slurm jobs, with replacements for `sbatch` and `srun` that run on this machine."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.toy_launcher import ToyLauncher
from tunekit.distributed.slurm import CPU_NOTE, SlurmJob
from tunekit.errors import UserError

SBATCH = """#!/bin/bash
# Run a script immediately, on the first node.
log=$(sed -n 's/^#SBATCH --output=//p' "$1" | sed 's/%j/17/')
nodes=$(sed -n 's/^#SBATCH --nodes=//p' "$1")
cpus=$(sed -n 's/^#SBATCH --cpus-per-task=//p' "$1")
[ -z "$cpus" ] || export SLURM_CPUS_PER_TASK=$cpus
SLURM_JOB_ID=17 SLURM_JOB_NODELIST='n[1-2]' NODES=$nodes bash "$1" > "$log" 2>&1
echo "Submitted batch job 17"
"""
SRUN = """#!/bin/bash
# Run the command once per node. SLURM_CPUS_PER_TASK is not inherited.
shift
echo "cpus of a task: ${SRUN_CPUS_PER_TASK:-1}"
for node in $(seq 0 $((NODES - 1))); do SLURM_NODEID=$node "$@" & pids="$pids $!"; done
for pid in $pids; do wait "$pid" || code=$?; done
exit ${code:-0}
"""
SCONTROL = "#!/bin/bash\necho localhost; echo other\n"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyLauncher:
    """Directory with the Slurm commands on the PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    return ToyLauncher.make(tmp_path)


@pytest.mark.multi
def test_job_runs_the_ranks_of_all_nodes(toy: ToyLauncher) -> None:
    result = toy.run("--slurm", "nodes=2,gpus=2,cpus-per-task=6", "--max-restarts", "1", "--overwrite", "fault=SIGKILL")
    assert (result.code, result.out) == (0, "Submitted batch job 17: out/logs/job.sh\n"), result
    log = (toy.folder / "out/logs/slurm-17.log").read_text()
    assert "starting 2 processes of 4 on 2 nodes" in log and "restart 1 of 1" in log, log
    assert "cpus of a task: 6\n" in log, log
    assert sorted((worker.rank, worker.size, worker.overwrite) for worker in toy.started_workers()) == sorted(
        (rank, 4, overwrite) for rank in range(4) for overwrite in (True, False)
    )


@pytest.mark.multi
def test_dry_run_writes_the_script_only(toy: ToyLauncher) -> None:
    result = toy.run("--slurm", "gpus=8,time=4:00:00,partition=x,exclude=a;b", "--dry-run", "steps=5")
    assert (result.code, result.out) == (0, f"written, not submitted: out/logs/job.sh{CPU_NOTE}\n"), result
    script = (toy.folder / "out/logs/job.sh").read_text()
    options = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert options >= {"nodes=1", "gpus-per-node=8", "time=4:00:00", "partition=x", "exclude=a,b", "signal=TERM@120"}
    assert "--rdzv-endpoint" not in script and "--nproc-per-node 8" in script and "steps=5" in script
    assert subprocess.run(["bash", "-n", toy.folder / "out/logs/job.sh"], check=False).returncode == 0
    (toy.folder / "bin/sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    refused = toy.run("--slurm", "gpus=8,partition=y")
    assert refused.code == 2 and "sbatch refused out/logs/job.sh: invalid partition" in refused.err


def test_slurm_options_are_validated() -> None:
    assert SlurmJob.parse("nodes=4, gpus=8, time=4:00:00") == SlurmJob(4, 8, {"time": "4:00:00"})
    with pytest.raises(UserError, match="'nodes'"):
        SlurmJob.parse("nods=2")
    assert SlurmJob.parse("container-image=a.sqsh,site-own=1").options == {"container-image": "a.sqsh", "site-own": "1"}
    for text in ("nodes=0", "gpus=many", "time", "=3", "a b=3"):
        with pytest.raises(UserError, match="--slurm"):
            SlurmJob.parse(text)
