"""Files behind a URL. A module of its own because fsspec and its drivers are slow to import."""

import hashlib
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from tunekit.data.readers import data_files
from tunekit.data.readers.filesystem import EDGE
from tunekit.errors import UserError
from tunekit.hub import redact

Result = TypeVar("Result")
PAUSES = (1.0, 4.0, 16.0)  # seconds before a read is tried again: a stream lives longer than a connection
# Columns are read in turns, each where it lies: what is fetched for one must not drive out what was for another.
CACHE = {"block_size": 2**22, "cache_type": "blockcache", "cache_options": {"maxblocks": 16}}
# What drivers raise that is no OSError, by the module that they have loaded.
DRIVERS = {
    "aiohttp": "ClientError",
    "azure.core.exceptions": "AzureError",
    "botocore.exceptions": "BotoCoreError",
    "gcsfs.retry": "HttpError",
    "google.auth.exceptions": "GoogleAuthError",
    "huggingface_hub.errors": "HTTPError",
}
# What of a store's entry changes with the content.
MARKS = ("etag", "md5hash", "crc32c", "content-md5", "blob_id", "checksum", "size", "mtime", "last-modified")
MARKS += ("lastmodified", "last_modified", "updated", "created", "generation")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store. `name` is its URL without what gives access to it."""

    name: str
    store: Any
    url: str

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(RetryingFile(tried(self.name, lambda: self.store.open(self.url, "rb", **CACHE))), EDGE)

    def digest(self, whole: bool) -> bytes:
        """Of its ETag, size, time or whatever the store tells; it is not fetched for this."""
        entry = tried(self.name, lambda: self.store.info(self.url))
        marks = sorted((key.lower(), str(value)) for key, value in entry.items() if key.lower() in MARKS)
        return hashlib.blake2b(repr(marks).encode(), digest_size=16).digest()


class RetryingFile(io.RawIOBase):
    """A file that a store is asked for again when it fails, and whose errors are all of one kind."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        data = self.read_again(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_again(self, count: int) -> bytes:
        for pause in PAUSES:
            try:
                return self.file.read(count)
            except (FileNotFoundError, PermissionError):
                raise
            except troubles():
                time.sleep(pause)
        try:
            return self.file.read(count)
        except troubles() as error:
            raise OSError(told(error)) from error

    def close(self) -> None:
        self.file.close()
        super().close()


def files(url: str, split: str) -> list[RemoteFile]:
    """The files that a URL names: one, those of a folder that are of the split, or those that a pattern matches."""
    name, store = shown(url), opened(url)
    if not data_files.is_glob(url):
        urls = tried(name, lambda: paths(store, url, split))
    else:
        data_files.check_train_split(name, split)
        urls = data_files.files_matching(name, tried(name, lambda: [whole(store, path) for path in store.glob(url)]))
    return [RemoteFile(shown(one), store, one) for one in urls]


def open_remote(url: str, name: str) -> RemoteFile:
    """The file that a URL names, which is known to be there; `name` is for messages."""
    return RemoteFile(name, opened(url), url)


def paths(store: Any, url: str, split: str) -> list[str]:
    """The URL of a file, or of what a folder has of a split."""

    def listed(folder: str) -> list[data_files.DirEntry]:
        entries = store.ls(folder, detail=True)
        return [data_files.DirEntry(whole(store, entry["name"]), entry["type"] == "directory") for entry in entries]

    if store.info(url)["type"] == "directory":
        return data_files.files_in_dir(url.rstrip("/"), split, listed)
    data_files.check_row_file(shown(url))
    data_files.check_train_split(shown(url), split)
    return [url]


def whole(store: Any, path: str) -> str:
    return str(store.unstrip_protocol(path))


def opened(url: str) -> Any:
    """The store behind a URL; UserError says which driver it wants."""
    protocol = urlsplit(url).scheme
    try:
        return url_to_fs(url)[0]
    except ImportError:
        driver = known_implementations[protocol]["class"].partition(".")[0]
        driver = f"'fsspec[{protocol.rstrip('s')}]'" if driver == "fsspec" else driver
        raise UserError(f"{shown(url)}: {protocol}:// wants a driver: pip install {driver}") from None
    except (*troubles(), ValueError) as error:
        raise UserError(f"{shown(url)}: {told(error)}") from None


def tried(name: str, act: Callable[[], Result]) -> Result:
    """What a store says, or a line on why it does not."""
    try:
        return act()
    except FileNotFoundError as error:
        if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError):
            raise UserError(f"{name}: no such file or folder") from None
        raise UserError(f"{name}: cannot be read: {told(error.__cause__)}") from None  # of a server that fails
    except PermissionError as error:
        raise UserError(f"{name}: you may not read it; check your credentials: {told(error)}") from None
    except (*troubles(), ValueError) as error:
        raise UserError(f"{name}: cannot be read: {told(error)}") from None


def troubles() -> tuple[type[Exception], ...]:
    """What the drivers that are loaded raise."""
    return (OSError, *(vars(sys.modules[module])[name] for module, name in DRIVERS.items() if module in sys.modules))


def shown(url: str) -> str:
    """A URL without its user, and without the query, which may give access."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def told(error: BaseException) -> str:
    return redact.redact_text(" ".join(str(error).split())) or type(error).__name__
