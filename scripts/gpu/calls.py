"""The calls on a GPU machine; scripts/gpu/run.sh prepares the environment and starts this.

python scripts/gpu/calls.py CALL --device cuda|cpu --output DIR --seconds 560
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from jobs import Call, Job

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts/gpu"
RUNS = Path("/tmp/tunekit-gpu-runs")
STEPS = ("max_steps=4", "eval_every=2")
PACKED = ("data.packing=true", "data.max_length=1024", "micro_batch_size=4", "global_batch_size=8")
GRAPHS = ("cuda_graph=true", "memory.activation_checkpointing=none", "max_steps=12")
FULL_OPTIONS = (
    ("memory.activation_checkpointing=full",),
    ("memory.activation_checkpointing=selective",),
    ("memory.activation_offloading=true",),
    ("compile=true",),
    ("compile=true", "precision.compute_dtype=fp32"),
    ("optimizer=adamw8bit",),
    ("optimizer=muon",),
    ("precision.compute_dtype=fp32",),
    ("precision.compute_dtype=tf32",),
    ("precision.compute_dtype=fp16",),
    ("deterministic=true",),
    ("precision.master_dtype=bf16",),
    ("save_every=2",),
    ("profiler=true",),
    ("memory.optimizer_in_bwd=true", "max_grad_norm=0", "global_batch_size=4"),
    GRAPHS,
)
QLORA_OPTIONS = (
    ("quantization=float8",),
    ("quantization=fp4",),
    ("quantization={kind: nf4, double_quant: true}",),
    ("adapter.kind=dora",),
    ("adapter.init=pissa",),
    ("precision.compute_dtype=fp16",),
    ("compile=true",),
    ("memory.activation_checkpointing=full",),
    GRAPHS,
)
CPU_FACTOR = 4  # time limits of jobs on a CPU, in units of those on a GPU
FOR_GPUS = {"memory.activation_offloading=true", "precision.compute_dtype=tf32"}  # options that a CPU refuses
ROLLOUTS = ("max_steps=3", "eval_every=3", "global_batch_size=32", "micro_batch_size=16")
PREFERENCE_LOSSES = ("simpo", "orpo", "kto")


def python(name: str, seconds: int, *words: str, stage: int = 0, summary: int = 0) -> Job:
    """A job that runs a Python file."""
    return Job(name, (sys.executable, *words), seconds, stage, summary_lines=summary)


def tune(name: str, seconds: int, device: str, *words: str, stage: int = 0) -> Job:
    """A job that runs a recipe."""
    return Job(name, ("tune", "run", *words, f"device={device}", "--debug"), seconds, stage)


def smoke(device: str) -> tuple[list[Job], int]:
    """Whether anything runs: each kernel, every recipe, about thirty runs of the nano."""
    shutil.rmtree(RUNS, ignore_errors=True)
    report = f"{os.environ['OUT']}/selftest-kernels.json"
    only = [word for name in ("kernels", "model") for word in ("--only", name)]
    command = ("tune", "selftest", "--device", device, *only, "--output", report)
    jobs = [Job("selftest kernels", command, 190, summary_lines=40)]
    for name, config in (("lora", "tools_lora"), ("full", "tools_full"), ("qlora", "tools_qlora")):
        jobs.append(tune(f"sft {name}", 120, device, "sft", f"nano/{config}", *STEPS, f"output_dir={RUNS}/{name}"))
    jobs += recipe_jobs(device)
    for config, choices in (("tools_full", FULL_OPTIONS), ("tools_qlora", QLORA_OPTIONS)):
        for options in choices:
            if device == "cpu" and FOR_GPUS.intersection(options):
                continue
            name = f"{config} {' '.join(options)}"
            # Both configs have memory.activation_checkpointing=full, and a directory belongs to one run.
            out = (
                f"output_dir={RUNS}/{'_'.join(''.join(c for c in word if c.isalnum()) for word in (config, *options))}"
            )
            jobs.append(tune(name, 150, device, "sft", f"nano/{config}", *STEPS, *PACKED, *options, out))
    return [*jobs, *resume_jobs(device)], 6 if device == "cuda" else 2


def recipe_jobs(device: str) -> list[Job]:
    """Each recipe but sft."""
    out = [f"output_dir={RUNS}/{name}" for name in ("packed", "dpo", "dpo_packed", "reward", "distill", "on_policy")]
    teacher = "teacher.model=tunekit/nano"
    on_policy = ("max_steps=3", teacher, "on_policy.lmbda=1.0", "on_policy.max_new_tokens=32")
    jobs = [
        tune("sft packed", 120, device, "sft", "nano/tools_lora", *STEPS, *PACKED, out[0]),
        tune("generate", 90, device, "generate", "nano/generate"),
        tune("dpo", 120, device, "preference", "nano/dpo", *STEPS, out[1]),
        tune("dpo packed", 120, device, "preference", "nano/dpo", *STEPS, *PACKED, out[2]),
        tune("reward", 120, device, "reward", "nano/reward", *STEPS, out[3]),
        tune("distill", 150, device, "distill", "nano/distill", *STEPS, teacher, out[4]),
        tune("distill on policy", 150, device, "distill", "nano/distill", *on_policy, out[5]),
        tune("evaluate", 150, device, "evaluate", "nano/preferred", "model=tunekit/nano", "sampling.max_new_tokens=16"),
    ]
    for loss in PREFERENCE_LOSSES:
        words = ("preference", "nano/dpo", *STEPS, f"loss={loss}", f"output_dir={RUNS}/{loss}")
        jobs.append(tune(f"preference {loss}", 120, device, *words))
    return jobs


def resume_jobs(device: str) -> list[Job]:
    """A run that is interrupted after its first saved state, then resumed."""
    words = ("sft", "nano/tools_lora", "max_steps=40", "save_every=4", "eval_data=null", f"output_dir={RUNS}/resume")
    first = tune("interrupted", 150, device, *words)
    first = Job(first.name, first.command, first.seconds, 1, interrupt_when=f"{RUNS}/resume/state/00000004/complete")
    return [first, tune("resumed", 150, device, *words, stage=2)]


def correctness(device: str) -> tuple[list[Job], int]:
    """Tests that need a GPU, and every family on the GPU next to the CPU, in parts that run next to each other."""
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", "8" if device == "cuda" else "2"]
    # Other files may import packages that the machine lacks, and an error of collection ends pytest.
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    jobs = [python("pytest -m gpu", 400, *tests, "--continue-on-collection-errors", *files, summary=15)]
    parts = 4 if device == "cuda" else 1
    few = ["--names", "llama3.2", "gemma2"] if device == "cpu" else []
    for part in range(parts):
        words = [str(SCRIPTS / "families.py"), device, "--part", str(part), "--parts", str(parts), *few]
        jobs.append(python(f"families, part {part + 1} of {parts}", 530, *words, summary=200))
    return jobs, 5 if device == "cuda" else 2


def speed(device: str) -> tuple[list[Job], int]:
    """Sections of benchmarks/gpu.py with their own time limits, the most important ones first."""
    small = ["--small"] if device == "cpu" else []
    sections = {"limits": 45, "lora": 90, "qlora": 90, "transformers_steps": 190, "cuda_graph": 70}
    sections |= {"full": 70, "dequantize": 45, "memory": 80, "vocabulary": 45}
    results = ["--results", os.environ["OUT"]]
    file = str(ROOT / "benchmarks/gpu.py")
    jobs = [python(name, seconds, file, name, *small, *results, summary=4) for name, seconds in sections.items()]
    return jobs, 1


def ranks(device: str) -> tuple[list[Job], int]:
    """FSDP with a process group of one rank, and generation."""
    small = ["--names", "llama3.2"] if device == "cpu" else []
    jobs = [python("one rank", 240, str(SCRIPTS / "one_rank.py"), device, *small, summary=60)]
    words = [str(SCRIPTS / "generation.py"), device, *(["--small"] if device == "cpu" else [])]
    return [*jobs, python("generation", 300, *words, stage=1, summary=60)], 1


def shapes(device: str) -> tuple[list[Job], int]:
    """Planned and measured memory of 1B models, then `tune selftest`."""
    small = ["--small"] if device == "cpu" else []
    words = [str(SCRIPTS / "planned.py"), device, *small]
    report = f"{os.environ['OUT']}/selftest.json"
    selftest = ("tune", "selftest", "--device", device, "--output", report)
    return [
        python("planned and measured memory", 330, *words, summary=30),
        Job("selftest", selftest, 200, 1, summary_lines=45),
    ], 1


def rollouts(device: str) -> tuple[list[Job], int]:
    """Reinforcement learning, embeddings, and the engine that samples answers."""
    nano = {
        "grpo": ("grpo", "nano/grpo", *ROLLOUTS),
        "grpo lora bf16": ("grpo", "nano/grpo", *ROLLOUTS, "adapter=lora", "precision.compute_dtype=bf16"),
        "grpo qlora": ("grpo", "nano/grpo", *ROLLOUTS, "adapter=lora", "quantization=nf4", "loss.beta=0.1"),
        "grpo compile": ("grpo", "nano/grpo", *ROLLOUTS, "compile=true"),
        "grpo key_value_lookup": ("grpo", "nano/grpo_key_value_lookup", "model=tunekit/nano", *ROLLOUTS),
        "ppo": ("ppo", "nano/ppo", *ROLLOUTS),
        "embed": ("embed", "nano/embed", *STEPS),
    }
    jobs = [
        tune(name, 180, device, *words, f"output_dir={RUNS}/{name.replace(' ', '_')}") for name, words in nano.items()
    ]
    words = [str(SCRIPTS / "engine.py"), device, *(["--small"] if device == "cpu" else [])]
    return [*jobs, python("engine", 300, *words, stage=1, summary=130)], 4 if device == "cuda" else 2


CALLS = {function.__name__: function for function in (smoke, correctness, speed, ranks, shapes, rollouts)}


def heading(device: str) -> str:
    """Versions and hardware."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, commit {commit.strip() or 'unknown'}"
    return f"{name}, {os.cpu_count()} cores, {versions}, {time.strftime('%Y-%m-%d %H:%M')}"


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--only", default="", help="part of the name of a job")
    args = parser.parse_args()
    os.environ["OUT"] = str(args.output)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    jobs, workers = CALLS[args.call](args.device)
    if args.device == "cpu":
        jobs = [replace(job, seconds=CPU_FACTOR * job.seconds) for job in jobs]
    if workers > 1:  # or threads of all jobs wait for the same cores
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (2 * workers))))
    call = Call(args.call, args.output, start + args.seconds, heading(args.device))
    return 0 if call.run([job for job in jobs if args.only in job.name], workers) else 1


if __name__ == "__main__":
    sys.exit(main())
