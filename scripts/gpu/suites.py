"""Suites of jobs that test and measure tunekit on a GPU machine. scripts/gpu/run.sh prepares the environment.

python scripts/gpu/suites.py SUITE --device cuda|cpu --output DIR --time-limit 560
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jobs import Job, JobRunner

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts/gpu"
RUNS_DIR = Path("/tmp/tunekit-gpu-runs")
SHORT_RUN = ("max_steps=4", "eval_every=2")
PACKING = ("data.packing=true", "data.max_length=1024", "micro_batch_size=4", "global_batch_size=8")
CUDA_GRAPH = ("cuda_graph=true", "memory.activation_checkpointing=none", "max_steps=12")
FULL_VARIANTS = (  # options of nano/tools_full, one run each
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
    CUDA_GRAPH,
)
QLORA_VARIANTS = (  # options of nano/tools_qlora
    ("quantization=float8",),
    ("quantization=fp4",),
    ("quantization={kind: nf4, double_quant: true}",),
    ("adapter.kind=dora",),
    ("adapter.init=pissa",),
    ("precision.compute_dtype=fp16",),
    ("compile=true",),
    ("memory.activation_checkpointing=full",),
    CUDA_GRAPH,
)
GPU_ONLY_OPTIONS = {"memory.activation_offloading=true", "precision.compute_dtype=tf32"}
CPU_TIME_LIMIT_FACTOR = 4  # time limit of a job on a CPU, relative to a GPU
ROLLOUT_OPTIONS = ("max_steps=3", "eval_every=3", "global_batch_size=32", "micro_batch_size=16")
PREFERENCE_LOSSES = ("simpo", "orpo", "kto")


class Suite(NamedTuple):
    """Jobs, and the number of jobs that run in parallel."""

    jobs: list[Job]
    num_workers: int


def build_python_job(name: str, time_limit: int, *arguments: str, stage: int = 0, num_report_lines: int = 0) -> Job:
    """A job that runs a Python file."""
    return Job(name, (sys.executable, *arguments), time_limit, stage, num_report_lines=num_report_lines)


def build_recipe_job(name: str, time_limit: int, device: str, *arguments: str, stage: int = 0) -> Job:
    return Job(name, ("tune", "run", *arguments, f"device={device}", "--debug"), time_limit, stage)


def get_size_option(device: str) -> list[str]:
    return ["--small"] if device == "cpu" else []


def build_smoke_suite(device: str) -> Suite:
    """Every kernel, every recipe, and about thirty training runs of the nano model."""
    shutil.rmtree(RUNS_DIR, ignore_errors=True)
    report = f"{os.environ['OUT']}/selftest-kernels.json"
    command = ("tune", "selftest", "--device", device, "--only", "kernels", "--only", "model", "--output", report)
    jobs = [Job("selftest kernels", command, 190, num_report_lines=40)]
    for name, config in (("lora", "tools_lora"), ("full", "tools_full"), ("qlora", "tools_qlora")):
        arguments = ("sft", f"nano/{config}", *SHORT_RUN, f"output_dir={RUNS_DIR}/{name}")
        jobs.append(build_recipe_job(f"sft {name}", 120, device, *arguments))
    jobs += [*build_other_recipe_jobs(device), *build_variant_jobs(device), *build_resume_jobs(device)]
    return Suite(jobs, 6 if device == "cuda" else 2)


def build_variant_jobs(device: str) -> list[Job]:
    """SFT with each of the options of FULL_VARIANTS and QLORA_VARIANTS."""
    variants = [("tools_full", options) for options in FULL_VARIANTS]
    variants += [("tools_qlora", options) for options in QLORA_VARIANTS]
    jobs = []
    for config, options in variants:
        if device == "cpu" and GPU_ONLY_OPTIONS.intersection(options):
            continue
        # The config is part of the directory name because both configs have variants with the same options.
        directory = "_".join("".join(filter(str.isalnum, text)) for text in (config, *options))
        arguments = ("sft", f"nano/{config}", *SHORT_RUN, *PACKING, *options, f"output_dir={RUNS_DIR}/{directory}")
        jobs.append(build_recipe_job(f"{config} {' '.join(options)}", 150, device, *arguments))
    return jobs


def build_other_recipe_jobs(device: str) -> list[Job]:
    """Packed SFT, and each recipe except SFT and the recipes of the suite `rollouts`."""
    teacher = "teacher.model=tunekit/nano"
    on_policy = ("max_steps=3", teacher, "on_policy.lmbda=1.0", "on_policy.max_new_tokens=32")
    training_runs = {
        "sft packed": (120, "sft", "nano/tools_lora", *SHORT_RUN, *PACKING),
        "dpo": (120, "preference", "nano/dpo", *SHORT_RUN),
        "dpo packed": (120, "preference", "nano/dpo", *SHORT_RUN, *PACKING),
        "reward": (120, "reward", "nano/reward", *SHORT_RUN),
        "distill": (150, "distill", "nano/distill", *SHORT_RUN, teacher),
        "distill on policy": (150, "distill", "nano/distill", *on_policy),
    }
    for loss in PREFERENCE_LOSSES:
        training_runs[f"preference {loss}"] = (120, "preference", "nano/dpo", *SHORT_RUN, f"loss={loss}")
    evaluate = ("evaluate", "nano/preferred", "model=tunekit/nano", "sampling.max_new_tokens=16")
    return [
        build_recipe_job("generate", 90, device, "generate", "nano/generate"),
        build_recipe_job("evaluate", 150, device, *evaluate),
        *(
            build_recipe_job(name, time_limit, device, *arguments, f"output_dir={RUNS_DIR}/{name.replace(' ', '_')}")
            for name, (time_limit, *arguments) in training_runs.items()
        ),
    ]


def build_resume_jobs(device: str) -> list[Job]:
    """A run that is interrupted after its first saved state, and resumed."""
    output = f"output_dir={RUNS_DIR}/resume"
    arguments = ("sft", "nano/tools_lora", "max_steps=40", "save_every=4", "eval_data=null", output)
    interrupted = build_recipe_job("interrupted", 150, device, *arguments, stage=1)
    interrupted = replace(interrupted, interrupt_file=f"{RUNS_DIR}/resume/state/00000004/complete")
    return [interrupted, build_recipe_job("resumed", 150, device, *arguments, stage=2)]


def build_correctness_suite(device: str) -> Suite:
    """Tests that need a GPU, and every model family on the GPU compared with the CPU, in parallel shards."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", "8" if device == "cuda" else "2"]
    # Other files may import packages that the machine does not have, and a collection error ends pytest.
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    arguments = (*pytest, "--continue-on-collection-errors", *files)
    jobs = [build_python_job("pytest -m gpu", 400, *arguments, num_report_lines=15)]
    num_shards = 4 if device == "cuda" else 1
    families = ["--families", "llama3.2", "gemma2"] if device == "cpu" else []
    for shard in range(num_shards):
        shard_options = ["--shard-id", str(shard), "--num-shards", str(num_shards)]
        arguments = (str(SCRIPTS / "compare_families.py"), device, *shard_options, *families)
        jobs.append(
            build_python_job(f"families, shard {shard + 1} of {num_shards}", 530, *arguments, num_report_lines=200)
        )
    return Suite(jobs, 5 if device == "cuda" else 2)


def build_speed_suite(device: str) -> Suite:
    """Sections of benchmarks/gpu.py with their own time limits, the most important ones first."""
    time_limits = {"limits": 45, "lora": 90, "qlora": 90, "transformers_steps": 190, "cuda_graph": 70}
    time_limits |= {"full": 70, "dequantize": 45, "memory": 80, "vocabulary": 45}
    options = [*get_size_option(device), "--results", os.environ["OUT"]]
    file = str(ROOT / "benchmarks/gpu.py")
    jobs = [
        build_python_job(section, time_limit, file, section, *options, num_report_lines=4)
        for section, time_limit in time_limits.items()
    ]
    return Suite(jobs, 1)


def build_ranks_suite(device: str) -> Suite:
    """FSDP with a process group of one rank; profiles of generation and of a training step."""
    families = ["--families", "llama3.2"] if device == "cpu" else []
    check = (str(SCRIPTS / "check_one_rank.py"), device, *families)
    profile = (str(SCRIPTS / "profile_generation_and_training.py"), device, *get_size_option(device))
    jobs = [
        build_python_job("one rank", 240, *check, num_report_lines=60),
        build_python_job("generation and training", 300, *profile, stage=1, num_report_lines=60),
    ]
    return Suite(jobs, 1)


def build_shapes_suite(device: str) -> Suite:
    """Planned and measured memory of 1B models, and `tune selftest`."""
    arguments = (str(SCRIPTS / "compare_planned_memory.py"), device, *get_size_option(device))
    selftest = ("tune", "selftest", "--device", device, "--output", f"{os.environ['OUT']}/selftest.json")
    jobs = [
        build_python_job("planned and measured memory", 330, *arguments, num_report_lines=30),
        Job("selftest", selftest, 200, 1, num_report_lines=45),
    ]
    return Suite(jobs, 1)


def build_rollouts_suite(device: str) -> Suite:
    """Reinforcement learning, embeddings, and the rollout engine."""
    training_runs = {
        "grpo": ("grpo", "nano/grpo", *ROLLOUT_OPTIONS),
        "grpo lora bf16": ("grpo", "nano/grpo", *ROLLOUT_OPTIONS, "adapter=lora", "precision.compute_dtype=bf16"),
        "grpo qlora": ("grpo", "nano/grpo", *ROLLOUT_OPTIONS, "adapter=lora", "quantization=nf4", "loss.beta=0.1"),
        "grpo compile": ("grpo", "nano/grpo", *ROLLOUT_OPTIONS, "compile=true"),
        "grpo key_value_lookup": ("grpo", "nano/grpo_key_value_lookup", "model=tunekit/nano", *ROLLOUT_OPTIONS),
        "ppo": ("ppo", "nano/ppo", *ROLLOUT_OPTIONS),
        "embed": ("embed", "nano/embed", *SHORT_RUN),
    }
    jobs = [
        build_recipe_job(name, 180, device, *arguments, f"output_dir={RUNS_DIR}/{name.replace(' ', '_')}")
        for name, arguments in training_runs.items()
    ]
    check = (str(SCRIPTS / "check_rollout_engine.py"), device, *get_size_option(device))
    jobs.append(build_python_job("engine", 300, *check, stage=1, num_report_lines=130))
    return Suite(jobs, 4 if device == "cuda" else 2)


SUITES: dict[str, Callable[[str], Suite]] = {
    "smoke": build_smoke_suite,
    "correctness": build_correctness_suite,
    "speed": build_speed_suite,
    "ranks": build_ranks_suite,
    "shapes": build_shapes_suite,
    "rollouts": build_rollouts_suite,
}


def describe_environment(device: str) -> str:
    """Hardware, versions and date."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, commit {commit.strip() or 'unknown'}"
    return f"{name}, {os.cpu_count()} cores, {versions}, {time.strftime('%Y-%m-%d %H:%M')}"


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="directory of the report, the log and JSON files")
    parser.add_argument("--time-limit", type=float, default=560, help="seconds until all jobs are stopped")
    parser.add_argument("--only", default="", metavar="NAME", help="run only jobs whose name contains NAME")
    args = parser.parse_args()
    os.environ["OUT"] = str(args.output)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    jobs, num_workers = SUITES[args.suite](args.device)
    if args.device == "cpu":
        jobs = [replace(job, time_limit=CPU_TIME_LIMIT_FACTOR * job.time_limit) for job in jobs]
    if num_workers > 1:  # otherwise the threads of all jobs compete for the same cores
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (2 * num_workers))))
    runner = JobRunner(args.suite, args.output, start + args.time_limit, describe_environment(args.device))
    return 0 if runner.run([job for job in jobs if args.only in job.name], num_workers) else 1


if __name__ == "__main__":
    sys.exit(main())
