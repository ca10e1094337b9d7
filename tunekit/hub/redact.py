"""Redacts passwords, tokens and local paths from published text. Paths are shortened to their last component."""

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from tunekit.config.secrets import HIDDEN, hide_secrets, map_strings

# Names of environment variables whose values are secret.
SECRET = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(?:API|ACCESS|PRIVATE)?_?KEY)(?:_|$)", re.I)
MIN_SECRET_LENGTH = 6  # characters; shorter values, such as 1, also occur in other text
ABSOLUTE = re.compile(r"(?:~|[A-Za-z]:\\|/).*", re.S)


def redact_tree(value: Any) -> Any:
    """Redact all strings in plain data."""
    return map_strings(value, lambda text: redact_text(redact_path(text)))


def redact_path(path: str) -> str:
    """Last component of an absolute path; any other text is unchanged."""
    return Path(path).name if ABSOLUTE.fullmatch(path) else path


def redact_text(value: str) -> str:
    """Redact secrets, and paths below the home and working directories."""
    for secret in find_secrets():
        value = value.replace(secret, HIDDEN)
    value = hide_secrets(value).replace(f"://{HIDDEN}@", "://")
    for folder in {os.path.expanduser("~"), str(Path.cwd())} - {"/", "~"}:  # noqa: PTH111 - Path.home() may raise
        value = re.sub(re.escape(folder) + r"(?:/[^\s\"'`)\],;]*)?", lambda match: Path(match[0]).name, value)
    return value


def find_secrets() -> list[str]:
    """Tokens and passwords in the environment, longest first, because one may contain another."""
    values = {value for key, value in os.environ.items() if SECRET.search(key)} | {hub_token()}
    return sorted((value for value in values if len(value) >= MIN_SECRET_LENGTH), key=len, reverse=True)


def hub_token() -> str:
    """Hub access token; '' if there is none or the home directory is unreadable, as with `docker run --user 1`."""
    try:
        return get_token() or ""
    except OSError:
        return ""
