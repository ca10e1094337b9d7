"""Write the bundled datasets and evaluation tasks: python -m scripts.nano.bundle tunekit/bundled"""

import argparse
from pathlib import Path

from scripts.nano import environments
from scripts.nano.preferences import write_preferences
from scripts.nano.retrieval import write_retrieval
from scripts.nano.sums import write_sums
from scripts.nano.tasks import write_tasks
from scripts.nano.tools import write_tools

DATASET_WRITERS = {
    "preferences": write_preferences,
    "retrieval": write_retrieval,
    "sums": write_sums,
    "tasks": write_tasks,
    "tools": write_tools,
    **environments.DATASET_WRITERS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for name, write_dataset in DATASET_WRITERS.items():
        write_dataset(directory / name)


if __name__ == "__main__":
    main()
