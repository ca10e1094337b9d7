"""Writing datasets in the JSON Lines format."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON object per line. Creates missing directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
