"""Xet storage of the Hub of the tests: what `hf_xet` sends and asks for, by the public specification of the protocol.

A file is a list of runs of chunks in xorbs; a shard says which. Files are put together when their shard arrives. They
count as uploaded if their SHA-256 is the one that the shard tells. Chunks come plain: tests ask `hf_xet` for that
(HF_XET_XORB_COMPRESSION_POLICY=none).
"""

import json
import re
import struct
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from tests.hub.wire import MODEL, Asked, Refused, Reply, route

TOKEN = "xet_short_lived"
HASH = "(?P<hash>[0-9a-f]{64})"
VERIFIED, DESCRIBED = 1 << 31, 1 << 30  # what follows the terms of a file in a shard
END = b"\xff" * 32


@dataclass(frozen=True)
class Term:
    """A run of chunks of a xorb."""

    xorb: str
    size: int
    first: int
    last: int  # exclusive


@dataclass
class Store:
    """Xorbs by their hashes, and files as lists of runs."""

    xorbs: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, list[Term]] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)  # of files, by their SHA-256

    def register(self, shard: bytes) -> dict[str, bytes]:
        """The files of a shard by their SHA-256."""
        at, found = 48, {}
        while shard[at : at + 32] != END:
            name, flags, count = text(shard[at : at + 32]), *struct.unpack_from("<II", shard, at + 32)
            rows = [shard[at + 48 * (i + 1) : at + 48 * (i + 2)] for i in range(count)]
            terms = [Term(text(row[:32]), *struct.unpack_from("<III", row, 36)) for row in rows]
            at += 48 * (1 + count + (count if flags & VERIFIED else 0))
            if not flags & DESCRIBED:
                raise Refused(400, "a shard without SHA-256")
            # The SHA-256 is written as their other hashes are.
            oid, data = text(shard[at : at + 32]), b"".join(self.read(term) for term in terms)
            at += 48
            if sha256(data).hexdigest() != oid:
                raise Refused(400, f"{oid} is not the checksum of what arrived")
            self.files[name], self.hashes[oid], found[oid] = terms, name, data
        return found

    def bounds(self, xorb: str) -> list[int]:
        """Where the chunks of a xorb begin in it, and where the last one ends."""
        if xorb not in self.xorbs:
            raise Refused(400, f"no xorb {xorb}")
        data, found = self.xorbs[xorb], [0]
        while found[-1] + 8 <= len(data) and data[found[-1]] == 0 and data[found[-1] : found[-1] + 7] != b"XETBLOB":
            found.append(found[-1] + 8 + int.from_bytes(data[found[-1] + 1 : found[-1] + 4], "little"))
        return found

    def read(self, term: Term) -> bytes:
        data, bounds = self.xorbs[term.xorb], self.bounds(term.xorb)
        assert all(data[at + 4] == 0 for at in bounds[term.first : term.last]), "compressed"
        return b"".join(data[bounds[i] + 8 : bounds[i + 1]] for i in range(term.first, term.last))


def text(value: bytes) -> str:
    """A hash in letters: four numbers of 64 bits, of which the last byte is the highest."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", value))


@route("GET", f"/api/models/{MODEL}/xet-(?P<scope>read|write)-token/(?P<revision>[^/]+)")
def access(hub: Any, asked: Asked, name: str, scope: str, revision: str) -> Reply:
    """Where the store is, and a token for it."""
    hub.commit(name, revision, asked.user, write=scope == "write" and "create_pr" not in asked.query)
    place, until = f"{hub.endpoint}/xet/{name}/{scope}", 2**33
    told = {"accessToken": TOKEN, "exp": until, "casUrl": place}
    headers = {"X-Xet-Cas-Url": place, "X-Xet-Access-Token": TOKEN, "X-Xet-Token-Expiration": str(until)}
    return Reply(data=json.dumps(told).encode(), headers=headers)


@route("POST", f"/xet/{MODEL}/write/v1/xorbs/default/{HASH}")
def keep_xorb(hub: Any, asked: Asked, name: str, hash: str) -> dict:
    known(hub, asked)
    hub.xet.xorbs[hash] = asked.body
    return {"was_inserted": True}


@route("POST", f"/xet/{MODEL}/write/v1/shards")
def keep_shard(hub: Any, asked: Asked, name: str) -> dict:
    known(hub, asked)
    hub.repos[name].objects |= hub.xet.register(asked.body)
    return {"result": 1}


@route("GET", f"/xet/{MODEL}/(?:read|write)/v1/reconstructions/{HASH}")
def reconstruction(hub: Any, asked: Asked, name: str, hash: str) -> dict:
    """Which runs of chunks hold a part of a file, and where they lie in the xorbs."""
    known(hub, asked)
    if hash not in hub.xet.files:
        raise Refused(404, "no such file")
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.range or "bytes=0-")
    assert wanted is not None
    first, last = int(wanted[1]), int(wanted[2] or 2**60)
    terms, places, at, skip = [], {}, 0, None
    for term in hub.xet.files[hash]:
        if at + term.size > first and at <= last:
            skip = max(0, first - at) if skip is None else skip
            chunks, bounds = {"start": term.first, "end": term.last}, hub.xet.bounds(term.xorb)
            terms.append({"hash": term.xorb, "unpacked_length": term.size, "range": chunks})
            part = {"start": bounds[term.first], "end": bounds[term.last] - 1}
            url = f"{hub.storage}/xorbs/{term.xorb}?signature=short-lived"
            places.setdefault(term.xorb, []).append({"range": chunks, "url": url, "url_range": part})
        at += term.size
    if skip is None:
        raise Refused(416, "beyond the end")
    return {"offset_into_first_range": skip, "terms": terms, "fetch_info": places}


@route("GET", f"/storage/xorbs/{HASH}")
def xorb(hub: Any, asked: Asked, hash: str) -> Reply:
    if asked.token is not None or "signature" not in asked.query or not asked.range:
        raise Refused(403, "who comes has a signed address, for a part")
    return Reply(data=hub.xet.xorbs[hash], headers={"Accept-Ranges": "bytes"})


def known(hub: Any, asked: Asked) -> None:
    """The Hub's own tokens are not for the store."""
    if asked.token != TOKEN or hub.xet is None:
        raise Refused(401, "not a token of this store")
