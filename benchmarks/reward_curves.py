"""Rewards by step of runs of recipe `grpo`, as a plot and a table.

tune run sft nano/demonstrations
tune run grpo nano/grpo_key_value_lookup
python benchmarks/reward_curves.py runs/nano-grpo-key-value-lookup [runs/OTHER ...] --plot rewards.png
"""

import argparse
from pathlib import Path

from plots import plot_rewards

from tunekit.loggers.metrics_file import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="output directories")
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    runs = {}
    print("| Run | Held-out reward, by step |\n|---|---|")
    for run in args.runs:
        lines = read_metrics(run)
        training, held_out = ([(line["step"], line[key]) for line in lines if key in line]
                              for key in ("reward", "eval/reward"))  # fmt: skip
        runs[run.name] = training, held_out
        print(f"| {run.name} | {', '.join(f'{step}: {100 * reward:.0f}%' for step, reward in held_out)} |")
    plot_rewards(args.plot, runs)


if __name__ == "__main__":
    main()
