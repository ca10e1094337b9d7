"""Remote files through fsspec. A separate module because fsspec and its drivers are slow to import."""

import hashlib
import io
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from tunekit.config.secrets import has_hidden_secret
from tunekit.data.readers import data_files
from tunekit.data.readers.filesystem import BLOCK_BYTES
from tunekit.data.readers.library_errors import LibraryErrors
from tunekit.errors import UserError
from tunekit.hub import redact
from tunekit.hub.foreign_hints import drop_hints

ENTRIES_PER_DIR = 100  # a request per directory: 1,000 of them end a search
RETRY_DELAYS = (1.0, 4.0, 16.0)  # seconds between attempts to read: streams outlive connections
# Columns are read alternately from different offsets; with few cached blocks they would evict each other.
CACHE_OPTIONS = {"block_size": 2**22, "cache_type": "blockcache", "cache_options": {"maxblocks": 16}}
# Exceptions of drivers that are not OSErrors, by the module that defines them.
DRIVER_ERRORS = {
    "aiohttp": "ClientError",
    "azure.core.exceptions": "AzureError",
    "botocore.exceptions": "BotoCoreError",
    "gcsfs.retry": "HttpError",
    "google.auth.exceptions": "GoogleAuthError",
    "huggingface_hub.errors": "HTTPError",
}
# Keys of fsspec's file info that change with the content.
VERSION_KEYS = ("etag", "md5hash", "crc32c", "content-md5", "blob_id", "checksum", "size", "mtime", "last-modified")
VERSION_KEYS += ("lastmodified", "last_modified", "updated", "created", "generation")


@dataclass(frozen=True)
class RemoteFile:
    """A file in an fsspec filesystem. `name` is its URL without credentials."""

    name: str
    filesystem: Any
    url: str

    def open(self) -> io.BufferedReader:
        with remote_errors(self.name):
            file = self.filesystem.open(self.url, "rb", **CACHE_OPTIONS)
        return io.BufferedReader(RetryingFile(file), BLOCK_BYTES)

    def digest(self, full: bool) -> bytes:
        """Hash of the ETag, size, time, or similar metadata. The file is not downloaded."""
        with remote_errors(self.name):
            info = self.filesystem.info(self.url)
        versions = sorted((key.lower(), str(value)) for key, value in info.items() if key.lower() in VERSION_KEYS)
        return hashlib.blake2b(repr(versions).encode(), digest_size=16).digest()


class RetryingFile(io.RawIOBase):
    """A file whose reads are retried, and whose errors become OSErrors."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:  # part of the io interface (vocabulary: ignore)
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        delays = iter(RETRY_DELAYS)
        while True:
            try:
                data = self.file.read(len(buffer))
                break
            except (FileNotFoundError, PermissionError):
                raise
            except driver_errors() as error:
                if (delay := next(delays, None)) is None:
                    raise OSError(error_text(error)) from error
                time.sleep(delay)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.file.close()
        super().close()


def open_remote_files(url: str, split: str) -> list[RemoteFile]:
    """Return the remote files of a split. The URL may be a file, a directory, or a glob pattern."""
    name, filesystem = without_credentials(url), open_filesystem(url)
    with remote_errors(name):
        if data_files.is_glob(url):
            data_files.check_train_split(name, split)
            urls = data_files.files_matching(name, url, partial(list_dir, filesystem), ENTRIES_PER_DIR)
        else:
            urls = resolve_urls(filesystem, url, split)
    return [RemoteFile(without_credentials(file_url), filesystem, file_url) for file_url in urls]


def resolve_urls(filesystem: Any, url: str, split: str) -> list[str]:
    """Return the URL of a file, or of the files of a split in a directory."""
    if filesystem.info(url)["type"] == "directory":
        return data_files.files_in_dir(url.rstrip("/"), split, partial(list_dir, filesystem))
    data_files.check_row_file(without_credentials(url))
    data_files.check_train_split(without_credentials(url), split)
    return [url]


def list_dir(filesystem: Any, directory: str) -> list[data_files.DirEntry]:
    entries = ((entry["name"], entry["type"]) for entry in filesystem.ls(directory, detail=True))
    return [data_files.DirEntry(full_url(filesystem, path), kind == "directory") for path, kind in entries]


def full_url(filesystem: Any, path: str) -> str:
    return str(filesystem.unstrip_protocol(path))


def open_filesystem(url: str) -> Any:
    """Return the fsspec filesystem of a URL. Raise UserError if its driver is not installed."""
    name, protocol = without_credentials(url), url.partition("://")[0]
    if has_hidden_secret(url):  # from the config.yaml of a run
        raise UserError(f"{name}: its secret was not saved; pass the address again")

    def describe(error: Exception) -> str:
        if not isinstance(error, ImportError):
            return f"{name}: not a valid URL for `source`: {error_text(error)}"
        driver = known_implementations.get(protocol, {"class": ""})["class"].partition(".")[0]
        driver = f"'fsspec[{protocol.rstrip('s')}]'" if driver == "fsspec" else driver
        hint = f"Install it with: pip install {driver}" if driver else error_text(error)
        return f"{name}: {protocol}:// needs a driver. {hint}"

    with LibraryErrors(describe):  # fsspec passes parts of the URL to its drivers as they are
        urlsplit(url)  # raises ValueError for a malformed host, which drivers find when they connect
        return url_to_fs(url)[0]


def remote_errors(name: str) -> LibraryErrors:
    """Context manager that turns errors of a filesystem into UserErrors."""

    def describe(error: Exception) -> str:
        if isinstance(error, PermissionError):
            return f"{name}: permission denied ({error_text(error)}). Check the credentials."
        if not isinstance(error, FileNotFoundError):
            return f"{name}: cannot read: {error_text(error)}"
        if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError):
            return f"{name}: no such file or directory"
        return f"{name}: cannot read: {error_text(error.__cause__)}"  # a server error

    return LibraryErrors(describe)


def driver_errors() -> tuple[type[Exception], ...]:
    """Return the exception types of all imported drivers."""
    names = DRIVER_ERRORS.items()
    return (OSError, *(getattr(sys.modules[module], name) for module, name in names if module in sys.modules))


def without_credentials(url: str) -> str:
    """Remove the user and the query from a URL, or from each URL of a chain: they may contain credentials."""
    return "::".join(
        re.sub(r"(://)[^/@]*@", r"\1", part.partition("?")[0].partition("#")[0]) for part in url.split("::")
    )


def error_text(error: BaseException) -> str:
    return redact.redact_text(drop_hints(error))
