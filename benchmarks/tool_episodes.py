"""Episodes per second with a tool on the CPU, compared with TRL's trainer: the same model, prompts, tool and sampling.

    tune run sft nano/demonstrations data.source=tunekit/calculator max_steps=40 output_dir=runs/nano-calls
    python benchmarks/tool_episodes.py runs/nano-calls/final [--prompts 16] [--answers 8] [--rounds 3]

A model calls a calculator, gets its result, and answers. Both libraries sample the conversations of one optimizer step
and compute their rewards; training is not measured. Implementations alternate.
"""

import argparse
import platform
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from turns import Work, turns

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware
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

MAX_NEW_TOKENS, TEMPERATURE, MAX_CALLS = 120, 0.8, 4
# How transformers parses the calls of this model's chat template
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


def ours(folder: Path, rows: list[dict[str, Any]], answers: int, report: list[str]) -> Work:
    source = HFCheckpoint.open(folder)
    options = NoQuantization(), FrozenModel(), PrecisionConfig("fp32", frozen_dtype="fp32"), MemoryConfig()
    model = build.build_model(source, *options, DistributedContext(0, "cpu"))
    tokenizer = build.open_tokenizer(source)
    engine = GenerationEngine(model, len(rows) * answers, 512, None)
    prompts = []
    for i, row in enumerate(rows):
        messages = [{"role": "user", "content": row["prompt"]}]
        prompts.append(PromptRow(f"row {i}", messages, encode_conversation(tokenizer, messages), row))
    sampling, steps = SamplingConfig(TEMPERATURE, max_new_tokens=MAX_NEW_TOKENS), iter(range(1000))

    def work() -> None:
        config = CalculatorConfig(max_turns=MAX_CALLS + 1)
        rollouts = generate_rollouts(engine, tokenizer, prompts, answers, sampling, config, next(steps))
        rewards = [rollout.environment_reward for rollout in rollouts]
        sampled = sum(rollout.num_sampled_tokens for rollout in rollouts)
        report.append(describe("tunekit", rewards, sampled, sum(r.metrics["num_tool_calls"] for r in rollouts)))

    return work


def theirs(folder: Path, rows: list[dict[str, Any]], answers: int, report: list[str]) -> Work:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = RESPONSE_TEMPLATE
    rewards: list[float] = []

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        rewards[:] = [
            float(is_expected(messages[-1].get("content") or "", expected))
            for messages, expected in zip(completions, answer, strict=True)
        ]
        return rewards

    args = trl.GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=len(rows) * answers, num_generations=answers,
        max_completion_length=MAX_NEW_TOKENS, temperature=TEMPERATURE, top_k=0, use_cpu=True, bf16=False,
        max_tool_calling_iterations=MAX_CALLS, report_to=[], gradient_checkpointing=False,
    )  # fmt: skip
    prompts = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model, reward, args, train_dataset=Dataset.from_list(prompts), processing_class=tokenizer, tools=[calculate]
    )
    trainer.model.train()

    def work() -> None:
        inputs = [row for row in prompts for _ in range(answers)]
        batch = trainer._generate_and_score_completions(inputs)
        calls = trainer._metrics["train"]["tools/call_frequency"][-1] * len(inputs)
        report.append(describe("TRL", rewards, int((batch["completion_mask"] * batch["tool_mask"]).sum()), calls))

    return work


def describe(name: str, rewards: list[float], sampled: int, calls: float) -> str:
    return f"{name}: mean reward {statistics.mean(rewards):.2f}, {sampled} sampled tokens, {calls:.0f} calls"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu", action="store_true", help="CPU time, which other processes affect less")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    print(f"{describe_hardware(torch.device('cpu'))}, {args.threads} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, trl {trl.__version__}, "
          f"Python {platform.python_version()}\n")  # fmt: skip
    rows = [dict(row.fields) for row in islice(open_dataset("tunekit/calculator", "train").rows, args.prompts)]
    report: list[str] = []
    works = {"tunekit": ours(args.model, rows, args.answers, report)}
    works["TRL"] = theirs(args.model, rows, args.answers, report)
    times = turns(works, args.rounds, time.process_time if args.cpu else time.perf_counter)
    print("\n".join(report))
    slowest = max(map(statistics.median, times.values()))
    print("\n| | s | episodes/s | ratio |\n|---|---|---|---|")
    for name, values in times.items():
        seconds = statistics.median(values)
        print(f"| {name} | {seconds:.2f} | {args.prompts * args.answers / seconds:.1f} | {slowest / seconds:.1f} |")


if __name__ == "__main__":
    main()
