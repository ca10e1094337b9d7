"""Xet storage of the test Hub, for `hf_xet`, after the public specification of the protocol.

A file is a list of chunk ranges of xorbs, which a shard contains. Files are assembled when their shard arrives, and are
uploaded if their SHA-256 is that of the shard. Chunks are uncompressed, which tests request from `hf_xet` by
HF_XET_XORB_COMPRESSION_POLICY=none.
"""

import json
import re
import struct
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from tests.helpers.hub.http_handler import MODEL, Reply, Request, RequestError, route

TOKEN = "xet_short_lived"
HASH = "(?P<hash>[0-9a-f]{64})"
VERIFIED, DESCRIBED = 1 << 31, 1 << 30  # flags of the sections after the terms of a file in a shard
END = b"\xff" * 32


@dataclass(frozen=True)
class Term:
    """A range of chunks of a xorb."""

    xorb: str
    size: int
    first: int
    last: int  # exclusive


@dataclass
class Store:
    """Xorbs by hash, and files as lists of chunk ranges."""

    xorbs: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, list[Term]] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)  # hashes of files, by their SHA-256

    def register(self, shard: bytes) -> dict[str, bytes]:
        """Read the files of a shard. Returns their contents by SHA-256."""
        offset, files = 48, {}
        while shard[offset : offset + 32] != END:
            name, flags, count = (
                hash_to_hex(shard[offset : offset + 32]),
                *struct.unpack_from("<II", shard, offset + 32),
            )
            rows = [shard[offset + 48 * (i + 1) : offset + 48 * (i + 2)] for i in range(count)]
            terms = [Term(hash_to_hex(row[:32]), *struct.unpack_from("<III", row, 36)) for row in rows]
            offset += 48 * (1 + count + (count if flags & VERIFIED else 0))
            if not flags & DESCRIBED:
                raise RequestError(400, "a shard without SHA-256")
            # The SHA-256 is encoded like the Xet hashes.
            oid, data = hash_to_hex(shard[offset : offset + 32]), b"".join(self.read(term) for term in terms)
            offset += 48
            if sha256(data).hexdigest() != oid:
                raise RequestError(400, f"checksum mismatch: {oid}")
            self.files[name], self.hashes[oid], files[oid] = terms, name, data
        return files

    def bounds(self, xorb: str) -> list[int]:
        """Offsets of the chunks of a xorb, and the end of the last one."""
        if xorb not in self.xorbs:
            raise RequestError(400, f"no xorb {xorb}")
        data, offsets = self.xorbs[xorb], [0]
        while (
            offsets[-1] + 8 <= len(data)
            and data[offsets[-1]] == 0
            and data[offsets[-1] : offsets[-1] + 7] != b"XETBLOB"
        ):
            offsets.append(offsets[-1] + 8 + int.from_bytes(data[offsets[-1] + 1 : offsets[-1] + 4], "little"))
        return offsets

    def read(self, term: Term) -> bytes:
        data, bounds = self.xorbs[term.xorb], self.bounds(term.xorb)
        assert all(data[at + 4] == 0 for at in bounds[term.first : term.last]), "compressed"
        return b"".join(data[bounds[i] + 8 : bounds[i + 1]] for i in range(term.first, term.last))


def hash_to_hex(value: bytes) -> str:
    """Hex form of a hash: four 64-bit little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", value))


@route("GET", f"/api/models/{MODEL}/xet-(?P<scope>read|write)-token/(?P<revision>[^/]+)")
def access(hub: Any, request: Request, name: str, scope: str, revision: str) -> Reply:
    """Reply with the URL of the storage and a token for it."""
    hub.commit(name, revision, request.user, write=scope == "write" and "create_pr" not in request.query)
    url, expiration = f"{hub.endpoint}/xet/{name}/{scope}", 2**33
    access_info = {"accessToken": TOKEN, "exp": expiration, "casUrl": url}
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": TOKEN, "X-Xet-Token-Expiration": str(expiration)}
    return Reply(data=json.dumps(access_info).encode(), headers=headers)


@route("POST", f"/xet/{MODEL}/write/v1/xorbs/default/{HASH}")
def keep_xorb(hub: Any, request: Request, name: str, hash: str) -> dict:
    require_storage_token(hub, request)
    hub.xet.xorbs[hash] = request.body
    return {"was_inserted": True}


@route("POST", f"/xet/{MODEL}/write/v1/shards")
def keep_shard(hub: Any, request: Request, name: str) -> dict:
    require_storage_token(hub, request)
    hub.repos[name].objects |= hub.xet.register(request.body)
    return {"result": 1}


@route("GET", f"/xet/{MODEL}/(?:read|write)/v1/reconstructions/{HASH}")
def reconstruction(hub: Any, request: Request, name: str, hash: str) -> dict:
    """Chunk ranges of a byte range of a file, and their byte ranges in the xorbs."""
    require_storage_token(hub, request)
    if hash not in hub.xet.files:
        raise RequestError(404, "no such file")
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.range or "bytes=0-")
    assert match is not None
    first, last = int(match[1]), int(match[2] or 2**60)
    terms, fetch_info, offset, skip = [], {}, 0, None
    for term in hub.xet.files[hash]:
        if offset + term.size > first and offset <= last:
            skip = max(0, first - offset) if skip is None else skip
            chunks, bounds = {"start": term.first, "end": term.last}, hub.xet.bounds(term.xorb)
            terms.append({"hash": term.xorb, "unpacked_length": term.size, "range": chunks})
            byte_range = {"start": bounds[term.first], "end": bounds[term.last] - 1}
            url = f"{hub.storage}/xorbs/{term.xorb}?signature=short-lived"
            fetch_info.setdefault(term.xorb, []).append({"range": chunks, "url": url, "url_range": byte_range})
        offset += term.size
    if skip is None:
        raise RequestError(416, "beyond the end")
    return {"offset_into_first_range": skip, "terms": terms, "fetch_info": fetch_info}


@route("GET", f"/storage/xorbs/{HASH}")
def xorb(hub: Any, request: Request, hash: str) -> Reply:
    if request.token is not None or "signature" not in request.query or not request.range:
        raise RequestError(403, "requires a signed URL and a range")
    return Reply(data=hub.xet.xorbs[hash], headers={"Accept-Ranges": "bytes"})


def require_storage_token(hub: Any, request: Request) -> None:
    """Require the token of the storage. Access tokens of the Hub are not valid here."""
    if request.token != TOKEN or hub.xet is None:
        raise RequestError(401, "not a token of this store")
