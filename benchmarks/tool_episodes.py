"""Episodes per second with a tool on the CPU, compared with TRL's trainer: the same model, prompts, tool and sampling.

    tune run sft nano/demonstrations data.source=tunekit/calculator max_steps=40 output_dir=runs/nano-calls
    python benchmarks/tool_episodes.py runs/nano-calls/final [--prompts 16] [--num-generations 8]

A model calls a calculator, gets its result, and answers. Both libraries sample the conversations of one optimizer step
and compute their rewards; training is not measured. Implementations alternate.
"""

import argparse
import statistics
import tempfile
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from interleave import Workload, measure_interleaved
from reporting import describe_environment

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.distributed.context import DistributedContext
from tunekit.environments.answers import is_expected
from tunekit.environments.calculator import Calculator
from tunekit.environments.config import CalculatorConfig
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization
from tunekit.rollouts.episodes import generate_rollouts
from tunekit.rollouts.rollout import PromptRow

MAX_NEW_TOKENS, TEMPERATURE, MAX_TOOL_CALLS = 120, 0.8, 4
# Response template of transformers, which parses the tool calls of this model
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*',
            "close_pattern": r"\}<\|turn\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|turn\|>\s*", "content": "text"},
    },
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: The expression, such as (3 + 4) * 5

    Returns:
        The value.
    """
    return Calculator().calculate(expression)


def build_tunekit_workload(
    directory: Path, rows: list[dict[str, Any]], num_generations: int, summaries: list[str]
) -> Workload:
    """Rollouts of one optimizer step; each call appends a summary."""
    source = HFCheckpoint.open(directory)
    options = NoQuantization(), FrozenModel(), PrecisionConfig("fp32", frozen_dtype="fp32"), MemoryConfig()
    model = build.build_model(source, *options, DistributedContext(0, "cpu"))
    tokenizer = build.open_tokenizer(source)
    engine = GenerationEngine(model, len(rows) * num_generations, 512, None)
    prompts = {}
    for i, row in enumerate(rows):
        messages = [{"role": "user", "content": row["prompt"]}]
        prompts[i] = PromptRow(f"row {i}", messages, encode_conversation(tokenizer, messages), row)
    sampling, steps = SamplingConfig(TEMPERATURE, max_new_tokens=MAX_NEW_TOKENS), count()

    def generate() -> None:
        config = CalculatorConfig(max_turns=MAX_TOOL_CALLS + 1)
        rollouts = generate_rollouts(engine, tokenizer, prompts, num_generations, sampling, config, next(steps))
        rewards = [rollout.environment_reward for rollout in rollouts]
        num_sampled_tokens = sum(rollout.num_sampled_tokens for rollout in rollouts)
        num_tool_calls = sum(rollout.metrics["num_tool_calls"] for rollout in rollouts)
        summaries.append(format_summary("tunekit", rewards, num_sampled_tokens, num_tool_calls))

    return generate


def build_trl_workload(
    directory: Path, rows: list[dict[str, Any]], num_generations: int, summaries: list[str]
) -> Workload:
    """Rollouts of one optimizer step; each call appends a summary."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.response_template = RESPONSE_TEMPLATE
    rewards: list[float] = []

    def compute_rewards(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        rewards[:] = [
            float(is_expected(messages[-1].get("content") or "", expected))
            for messages, expected in zip(completions, answer, strict=True)
        ]
        return rewards

    args = trl.GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=len(rows) * num_generations, num_generations=num_generations,
        max_completion_length=MAX_NEW_TOKENS, temperature=TEMPERATURE, top_k=0, use_cpu=True, bf16=False,
        max_tool_calling_iterations=MAX_TOOL_CALLS, report_to=[], gradient_checkpointing=False,
    )  # fmt: skip
    prompts = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    dataset = Dataset.from_list(prompts)
    trainer = trl.GRPOTrainer(
        model, compute_rewards, args, train_dataset=dataset, processing_class=tokenizer, tools=[calculate]
    )
    trainer.model.train()

    def generate() -> None:
        inputs = [row for row in prompts for _ in range(num_generations)]
        batch = trainer._generate_and_score_completions(inputs)
        num_tool_calls = trainer._metrics["train"]["tools/call_frequency"][-1] * len(inputs)
        num_sampled_tokens = int((batch["completion_mask"] * batch["tool_mask"]).sum())
        summaries.append(format_summary("TRL", rewards, num_sampled_tokens, num_tool_calls))

    return generate


def format_summary(library: str, rewards: list[float], num_sampled_tokens: int, num_tool_calls: float) -> str:
    mean_reward = statistics.mean(rewards)
    return f"{library}: mean reward {mean_reward:.2f}, {num_sampled_tokens} sampled tokens, {num_tool_calls:.0f} calls"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--num-generations", type=int, default=8, help="episodes per prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, which other processes affect less")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    print(f"{describe_environment('transformers', 'trl')}\n")
    rows = [dict(row.fields) for row in islice(open_dataset("tunekit/calculator", "train").rows, args.prompts)]
    summaries: list[str] = []
    builders = {"tunekit": build_tunekit_workload, "TRL": build_trl_workload}
    workloads = {name: build(args.model, rows, args.num_generations, summaries) for name, build in builders.items()}
    times = measure_interleaved(workloads, args.rounds, time.process_time if args.cpu_time else time.perf_counter)
    print("\n".join(summaries))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print("\n| | s | episodes/s | speedup over the slowest |\n|---|---|---|---|")
    for name, median in medians.items():
        episodes_per_second = args.prompts * args.num_generations / median
        print(f"| {name} | {median:.2f} | {episodes_per_second:.1f} | {max(medians.values()) / median:.1f} |")


if __name__ == "__main__":
    main()
