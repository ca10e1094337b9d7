"""Read mutated files, and report crashes, hangs and errors other than UserError.

python scripts/fuzz.py --count 2000 --seed 1 [config.json model.safetensors ...]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.fuzz import TARGETS, fuzz_file, write_corpus


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", default=[*TARGETS], metavar="FILE", help=f"default: {' '.join(TARGETS)}")
    parser.add_argument("--count", type=int, default=1000, help="mutations of each file (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_findings = 0
    for name in args.files:
        with tempfile.TemporaryDirectory() as directory:
            write_corpus(Path(directory))
            start = time.perf_counter()
            outcomes, findings = fuzz_file(name, args.count, Path(directory), args.seed)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        print(f"{name}: {counts}; {time.perf_counter() - start:.0f} s", flush=True)
        print(*findings[:20], sep="\n", flush=True)
        num_findings += len(findings)
    return int(num_findings > 0)


if __name__ == "__main__":
    sys.exit(main())
