"""Large files, piece by piece: what a broken connection or a killed process has left is kept, and not fetched again.

The client throws away a file that did not come whole. So those beyond `KEPT` are fetched here, checked, and put where
the client looks before it fetches: into the blobs of its cache, whose layout is documented, or the folder of the user.
Files of Xet storage are left to the client, which fetches them in another way.
"""

import fcntl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import file_digest
from importlib.util import find_spec
from os import fstat
from os.path import samestat
from pathlib import Path
from threading import Event
from typing import IO

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_session,
    hf_hub_url,
    hf_raise_for_status,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # of the HTTP library that this version of the client uses # pyright: ignore[reportPrivateImportUsage]
)
from huggingface_hub.utils import build_hf_headers, filter_repo_objects
from tqdm import tqdm

from tunekit.errors import UserError
from tunekit.hub.errors import print_line, retry

# All but weights; what a model card and a licence say goes into those of what is made of the model.
SMALL = ("*.json", "*.jinja", "tokenizer.model", "*.txt", "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*")
KEPT = 10 * 2**20  # bytes: shorter files are left to the client
PROGRESS = 2**20  # bytes after which a broken connection is taken up again at once
STREAMS = 4


@dataclass(frozen=True)
class Files:
    """Which files of a repository, as globs over their whole paths. By default those that this toolkit reads."""

    include: tuple[str, ...] = ("*.safetensors", *SMALL)
    exclude: tuple[str, ...] = ("original/*", "onnx/*", "consolidated*")  # copies for other programs


@dataclass(frozen=True)
class Large:
    """A file of a repository, and where it is to lie."""

    repo: str
    path: str
    url: str
    size: int
    sha256: str
    place: Path
    partial: Path


def fetch(name: str, revision: str | None, files: Files, to: Path | None, token: str | None) -> None:
    """Fetch the large files of a repository that are not here yet. The client does the rest, and says what is wrong."""
    missing = [file for file in listed(name, revision, files, to, token) if not by_xet(file, token)]
    total, stop = sum(file.size for file in missing), Event()
    with (
        tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=None if missing else True, leave=False) as bar,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        try:
            list(pool.map(lambda file: grab(file, token, bar, stop), missing))
        finally:
            stop.set()  # after an error or Ctrl-C the others keep what they have, and end
            pool.shutdown(cancel_futures=True)


def listed(name: str, revision: str | None, files: Files, to: Path | None, token: str | None) -> list[Large]:
    """The large files that are wanted and not here. None if the Hub does not tell: all may be in the cache."""
    try:
        info = HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    except (HTTPError, OSError):
        return []
    sizes = {file.rfilename: (file.lfs.sha256, file.lfs.size) for file in info.siblings or [] if file.lfs}
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    found, wanted = {}, list(files.include)
    for path in filter_repo_objects(sizes, allow_patterns=wanted, ignore_patterns=list(files.exclude)):
        oid, size = sizes[path]
        place = to / path if to else blobs / oid
        folder = to / ".cache/tunekit" if to else blobs
        cached = isinstance(try_to_load_from_cache(name, path, revision=info.sha), str)
        here = cached or (place.is_file() and place.stat().st_size == size)
        if size > KEPT and not here and ".." not in place.parts:
            url = hf_hub_url(name, path, revision=info.sha)
            found[place] = Large(name, path, url, size, oid, place, folder / f"{oid}.incomplete")
    return list(found.values())


def by_xet(file: Large, token: str | None) -> bool:
    """Whether the client fetches this file from Xet storage."""
    if constants.HF_HUB_DISABLE_XET or find_spec("hf_xet") is None:
        return False
    return get_hf_file_metadata(file.url, token=token).xet_file_data is not None


def grab(file: Large, token: str | None, bar: tqdm, stop: Event) -> None:
    """Fetch what is missing of a file, check all of it and put it in its place."""
    file.partial.parent.mkdir(parents=True, exist_ok=True)
    file.place.parent.mkdir(parents=True, exist_ok=True)
    with file.partial.open("ab") as partial:
        while not stop.is_set() and not alone(partial):
            stop.wait(1)  # for another process that fetches the same
        if not file.partial.is_file() or not samestat(file.partial.stat(), fstat(partial.fileno())):
            return  # that process has put it in its place
        bar.update(partial.tell())
        while partial.tell() < file.size and not stop.is_set():
            retry(lambda: receive(file, partial, token, bar, stop), file.path)
        partial.flush()
        if not stop.is_set():
            check(file)
            file.partial.rename(file.place)


def check(file: Large) -> None:
    """What came is what the Hub has. If it is not, it goes."""
    with file.partial.open("rb") as whole:
        found = file_digest(whole, "sha256").hexdigest()
    if found != file.sha256:
        file.partial.unlink()
        raise UserError(f"{file.repo}: {file.path} came damaged, its checksum is another one: start again")


def alone(partial: IO[bytes]) -> bool:
    """Whether this process alone has the file, from now until it closes it."""
    try:
        fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def receive(file: Large, partial: IO[bytes], token: str | None, bar: tqdm, stop: Event) -> None:
    """Add to what is there until the file ends or the connection breaks; that is an error if next to nothing came."""
    start = partial.tell()
    headers = build_hf_headers(token=token) | {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    session, timeout = get_session(), constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        with session.stream("GET", file.url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            hf_raise_for_status(response)
            if start and response.status_code == 200:  # all of it, from its first byte
                partial.seek(partial.truncate(0))
                bar.update(-start)
            for data in response.iter_bytes():
                partial.write(data)
                bar.update(len(data))
                if stop.is_set():
                    return
    except HTTPError as error:
        came = partial.tell() - start
        if isinstance(error, HfHubHTTPError) or came < PROGRESS:
            raise
        print_line(f"{file.path}: lost the connection after {partial.tell() / 1e6:,.0f} MB; going on from there")
