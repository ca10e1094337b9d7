"""Rewards by step of runs of recipe grpo, as a picture and a table.

tune run sft nano/demonstrations
tune run grpo nano/grpo_key_value_lookup
python benchmarks/environments.py runs/nano-grpo-key-value-lookup [runs/OTHER ...] --picture rewards.png
"""

import argparse
from pathlib import Path

import picture

from tunekit.loggers.metrics_file import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, required=True)
    args = parser.parse_args()
    runs = {}
    print("| Run | Held-out reward, by step |\n|---|---|")
    for run in args.runs:
        lines = read_metrics(run)
        training, held_out = ([(line["step"], line[key]) for line in lines if key in line]
                              for key in ("reward", "eval/reward"))  # fmt: skip
        runs[run.name] = training, held_out
        print(f"| {run.name} | {', '.join(f'{step}: {100 * reward:.0f}%' for step, reward in held_out)} |")
    picture.rewards(args.picture, runs)


if __name__ == "__main__":
    main()
