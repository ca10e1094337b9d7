"""What may be told to strangers: no password, no token, and of paths on this machine only the last name."""

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

HIDDEN = "***"
# Names of environment variables whose values are nobody's business.
SECRET = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(?:API|ACCESS|PRIVATE)?_?KEY)(?:_|$)", re.I)
SHORTEST = 6  # characters of a value that can be a secret: shorter ones, such as 1, stand in other words too
USER = re.compile(r"(?<=://)[^/@\s\"'`]+@")  # name and password before the host of an address
QUERY = re.compile(r"([?&][\w.-]*(?:token|key|secret|password|signature|credential)[\w.-]*=)[^&\s\"'`]+", re.I)
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
ABSOLUTE = re.compile(r"(?:~|[A-Za-z]:\\|/).*", re.S)


def redact_tree(value: Any) -> Any:
    """Plain data with every text made discreet."""
    if isinstance(value, dict):
        return {key: redact_tree(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(child) for child in value]
    return redact_text(redact_path(value)) if isinstance(value, str) else value


def redact_path(path: str) -> str:
    """The last name of a whole path; any other text as it is."""
    return Path(path).name if ABSOLUTE.fullmatch(path) else path


def redact_text(value: str) -> str:
    """Any text without secrets and without paths to this user's and this process's folders."""
    for secret in secrets():
        value = value.replace(secret, HIDDEN)
    value = TOKEN.sub(HIDDEN, QUERY.sub(rf"\1{HIDDEN}", USER.sub("", value)))
    for folder in {os.path.expanduser("~"), str(Path.cwd())} - {"/", "~"}:  # noqa: PTH111 - Path.home() may raise
        value = re.sub(re.escape(folder) + r"(?:/[^\s\"'`)\],;]*)?", lambda found: Path(found[0]).name, value)
    return value


def secrets() -> list[str]:
    """Tokens and passwords that this process knows, the longest first: one may be a part of another."""
    known = {value for key, value in os.environ.items() if SECRET.search(key)} | {hub_token()}
    return sorted((value for value in known if len(value) >= SHORTEST), key=len, reverse=True)


def hub_token() -> str:
    """The token of the Hub. A home that cannot be read, as in containers with `--user 1234`, has none."""
    try:
        return get_token() or ""
    except OSError:
        return ""
