"""A Hugging Face Hub on loopback, for the client as it is: what that asks for, answered from memory.

It speaks: whoami, creating repositories, branches and pull requests, `preupload`, large objects (in one part or in
several), commits, listings with pages, and files with ranges. It checks what it gets as the Hub does, and keeps a
repository as it was until a commit is whole. Tests tell it what shall go wrong (`Fault`), and read what was asked
(`Hub.log`). Large objects lie on another host, as on the Hub: no access token must ever arrive there.
"""

import base64
import json
import re
from dataclasses import dataclass
from hashlib import md5, sha256
from http.server import ThreadingHTTPServer
from threading import RLock, Thread
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from tests.hub.repos import NAME, REGULAR, Blob, Commit, Repo, card_problems, first_commit, is_id
from tests.hub.wire import MODEL, ROUTES, Asked, Fault, Handler, Refused, Reply, Seen, route
from tests.hub.xet import Store

STALE = "A commit has happened since. Please refresh and try again."


@dataclass(frozen=True)
class User:
    """Who a token belongs to, and whether it may write. `orgs` are those in whose name it may do so."""

    name: str
    writes: bool = True
    orgs: tuple[str, ...] = ()


class Hub:
    """`with Hub() as hub:` a Hub at `hub.endpoint`."""

    def __init__(self, tokens: dict[str, User] | None = None) -> None:
        self.tokens = tokens or {}
        self.repos: dict[str, Repo] = {}
        self.log: list[Seen] = []
        self.faults: list[Fault] = []
        self.parts: dict[tuple[str, int], bytes] = {}  # of large objects that come in several
        self.page, self.part = 1000, 2**40  # entries on a page of a listing, bytes of a part
        self.xet: Store | None = None  # where large objects lie, if not in the store of git's
        self.quota = 2**50  # bytes of large objects in one repository
        self.lock = RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.storage = f"http://localhost:{self.server.server_port}/storage"

    def __enter__(self) -> "Hub":
        Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def put(self, name: str, files: dict[str, bytes], **options: Any) -> Repo:
        """A repository with these files, or one commit more."""
        repo = self.repos.setdefault(name, Repo(name, **options))
        owner = name.partition("/")[0]
        before = repo.find("main") or repo.add("main", first_commit(owner))
        blobs = {path: Blob(data, repo.is_large(path, len(data), before)) for path, data in files.items()}
        repo.objects |= {blob.sha256: blob.data for blob in blobs.values() if blob.large}
        repo.add("main", Commit({**before.files, **blobs}, "put there", owner, before.oid))
        return repo

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            return next((fault for fault in self.faults if fault.fits(method, path)), None)

    def seen(self, method: str = ".*", path: str = "") -> list[Seen]:
        """What was asked, by method and path."""
        return [one for one in self.log if re.fullmatch(method, one.method) and re.search(path, one.path)]

    def answer(self, method: str, path: str, asked: Asked) -> Reply:
        """What the Hub says, as if nothing went wrong."""
        if asked.token is not None and asked.token not in self.tokens and not path.startswith(("/storage/", "/xet/")):
            raise Refused(401, "Invalid credentials in Authorization header")
        asked.user = self.tokens.get(asked.token or "")
        path = path.replace("/datasets/", "/models/" if path.startswith("/api/") else "/", 1)  # they are kept alike
        with self.lock:
            for verbs, pattern, act in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and method in verbs:
                    told = act(self, asked, **{key: unquote(word) for key, word in found.groupdict("").items()})
                    return told if isinstance(told, Reply) else Reply(data=json.dumps(told).encode())
            raise Refused(404, f"no such page: {method} {path}")

    def repo(self, name: str, user: User | None, write: bool = False) -> Repo:
        """A repository that this user may see, or change."""
        repo = self.repos.get(name)
        owner = name.partition("/")[0]
        own = user is not None and owner in (user.name, *user.orgs)
        if repo is None or (repo.private and not own and not (user and user.name in repo.members)):
            code = 404 if user else 401  # who has not said who it is, is not told what there is
            raise Refused(code, "Repository not found" if user else "Invalid username or password.", "RepoNotFound")
        if write and not (own and user and user.writes):
            raise Refused(403 if user else 401, "you don't have write permission on this repository")
        return repo

    def commit(self, name: str, revision: str, user: User | None, write: bool = False) -> tuple[Repo, Commit]:
        repo = self.repo(name, user, write)
        commit = repo.find(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, commit


@route("GET", "/api/whoami-v2")
def whoami(hub: Hub, asked: Asked) -> dict:
    if asked.user is None:
        raise Refused(401, "Invalid username or password.")
    role = {"displayName": "test", "role": "write" if asked.user.writes else "read"}
    orgs = [{"name": org, "roleInOrg": "write"} for org in asked.user.orgs]
    return {"type": "user", "name": asked.user.name, "orgs": orgs, "auth": {"accessToken": role}}


@route("POST", "/api/repos/create")
def create(hub: Hub, asked: Asked) -> dict:
    wanted, user = asked.json(), asked.user
    if user is None:
        raise Refused(401, "Invalid username or password.")
    owner = wanted.get("organization") or user.name
    name = f"{owner}/{wanted['name']}"
    if not is_id(name) or not NAME.fullmatch(wanted["name"]) or name.endswith(".git"):
        raise Refused(400, f"Invalid model name: {wanted['name']}")
    if not user.writes or owner not in (user.name, *user.orgs):
        raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
    url = f"{hub.endpoint}/{name}"
    if name in hub.repos:
        raise Refused(409, "You already created this model repo", url=url)
    private = wanted.get("private") or wanted.get("visibility") == "private"
    hub.repos[name] = repo = Repo(name, bool(private))
    repo.add("main", first_commit(user.name))
    return {"url": url, "name": name, "id": name}


@route("POST", "/api/validate-yaml")
def validate(hub: Hub, asked: Asked) -> Reply:
    wrong, odd = card_problems(asked.json()["content"])
    told = {"errors": [{"message": line} for line in wrong], "warnings": [{"message": line} for line in odd]}
    return Reply(400 if wrong else 200, json.dumps(told).encode())


@route("GET", f"/api/models/{MODEL}(?:/revision/(?P<revision>[^/]+))?")
def model(hub: Hub, asked: Asked, name: str, revision: str) -> dict:
    repo, commit = hub.commit(name, revision or "main", asked.user)
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    if "blobs" in asked.query:
        siblings = [blob.sibling(path) for path, blob in sorted(commit.files.items())]
    told = {"_id": "0", "id": name, "modelId": name, "sha": commit.oid, "siblings": siblings, "tags": []}
    told |= {"private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False}
    return told | {"author": name.partition("/")[0], "lastModified": commit.date, "downloads": 0, "likes": 0}


@route("GET", f"/api/models/{MODEL}/refs")
def refs(hub: Hub, asked: Asked, name: str) -> dict:
    repo = hub.repo(name, asked.user)
    full = {ref if "/" in ref else f"refs/heads/{ref}": oid for ref, oid in repo.refs.items()}
    full |= {f"refs/tags/{tag}": oid for tag, oid in repo.tags.items()}
    shown = [{"ref": ref, "name": ref.split("/", 2)[2], "targetCommit": oid} for ref, oid in full.items()]
    kinds = {"branches": "refs/heads/", "tags": "refs/tags/", "converts": "refs/convert/"}
    kinds |= {"pullRequests": "refs/pr/"} if "include_prs" in asked.query else {}
    return {kind: [ref for ref in shown if ref["ref"].startswith(start)] for kind, start in kinds.items()}


@route("GET", f"/api/models/{MODEL}/commits/(?P<revision>[^/]+)")
def commits(hub: Hub, asked: Asked, name: str, revision: str) -> Reply:
    repo, _ = hub.commit(name, revision, asked.user)
    told = [{"id": one.oid, "title": one.title, "message": one.description, "date": one.date,
             "authors": [{"user": one.author}]} for one in repo.history(revision)]  # fmt: skip
    return pages(hub, asked, f"/api/models/{name}/commits/{quote(revision, safe='')}", told)


@route("GET", f"/api/models/{MODEL}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?")
def tree(hub: Hub, asked: Asked, name: str, revision: str, path: str) -> Reply:
    _, commit = hub.commit(name, revision, asked.user)
    start = f"{path.rstrip('/')}/" if path else ""
    inside = {file: blob for file, blob in commit.files.items() if file.startswith(start)}
    if path and not inside:
        raise Refused(404, f"{path} does not exist on {revision!r}", "EntryNotFound")
    folders = {
        file[: len(start) + cut] for file in inside for cut, sign in enumerate(file[len(start) :]) if sign == "/"
    }
    found = [{"type": "directory", "oid": commit.oid, "size": 0, "path": folder} for folder in folders]
    found += [blob.entry(file) for file, blob in inside.items()]
    if asked.query.get("recursive", ["false"])[0].lower() not in ("true", "1"):
        found = [entry for entry in found if "/" not in entry["path"][len(start) :]]
    return pages(
        hub, asked, f"/api/models/{name}/tree/{quote(revision, safe='')}", sorted(found, key=lambda e: e["path"])
    )


def pages(hub: Hub, asked: Asked, path: str, rows: list[dict]) -> Reply:
    """One page, and where the next one is."""
    first = int(asked.query.get("cursor", ["0"])[0])
    kept = "&".join(f"{key}={words[0]}" for key, words in asked.query.items() if key != "cursor")
    following = f'<{hub.endpoint}{path}?{kept}&cursor={first + hub.page}>; rel="next"'
    headers = {"Link": following} if first + hub.page < len(rows) else {}
    return Reply(data=json.dumps(rows[first : first + hub.page]).encode(), headers=headers)


@route("POST", f"/api/models/{MODEL}/paths-info/(?P<revision>[^/]+)")
def paths_info(hub: Hub, asked: Asked, name: str, revision: str) -> list[dict]:
    _, commit = hub.commit(name, revision, asked.user)
    wanted = parse_qs(asked.body.decode()).get("paths", [])
    return [commit.files[path].entry(path) for path in wanted if path in commit.files]


@route("POST", f"/api/models/{MODEL}/branch/(?P<branch>[^/]+)")
def branch(hub: Hub, asked: Asked, name: str, branch: str) -> dict:
    repo, commit = hub.commit(name, asked.json().get("startingPoint") or "main", asked.user, write=True)
    if branch in repo.refs:
        raise Refused(409, f"Reference already exists: refs/heads/{branch}")
    repo.refs[branch] = commit.oid
    return {}


@route("POST", f"/api/models/{MODEL}/preupload/(?P<revision>[^/]+)")
def preupload(hub: Hub, asked: Asked, name: str, revision: str) -> dict:
    repo, commit = hub.commit(name, revision, asked.user, write="create_pr" not in asked.query)
    told = []
    for file in asked.json()["files"]:
        large, there = repo.is_large(file["path"], file["size"], commit), commit.files.get(file["path"])
        row = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        told.append(row | ({"oid": there.etag} if there else {}))
    return {"files": told}


@route("POST", f"/{MODEL}.git/info/lfs/objects/batch")
def batch(hub: Hub, asked: Asked, name: str) -> dict:
    repo = hub.repo(name, asked.user)
    wanted = asked.json()
    assert wanted["operation"] == "upload" and wanted["hash_algo"] == "sha256"
    sizes = sum(len(data) for data in repo.objects.values())
    if sizes + sum(one["size"] for one in wanted["objects"] if one["oid"] not in repo.objects) > hub.quota:
        raise Refused(403, "Private repository storage limit reached, please upgrade your plan")
    if hub.xet is not None and "xet" in wanted["transfers"]:  # older clients ask; newer ones use Xet if they have it
        return {"transfer": "xet", "objects": wanted["objects"]}
    told = [one | ({} if one["oid"] in repo.objects else actions(hub, name, **one)) for one in wanted["objects"]]
    return {"transfer": "multipart" if hub.part < 2**40 else "basic", "objects": told}


def actions(hub: Hub, name: str, oid: str, size: int) -> dict:
    """Where to send a large object, whole or in parts."""
    place = f"{hub.storage}/{name}/{oid}"
    parts = range(1, -(-size // hub.part) + 1)
    several = {"chunk_size": str(hub.part), **{str(n): f"{place}/{n}?signature=short-lived" for n in parts}}
    whole = {"href": f"{place}/all?size={size}&signature=short-lived"}
    upload = whole if len(parts) == 1 else {"href": f"{place}/complete?signature=short-lived", "header": several}
    return {"actions": {"upload": upload, "verify": {"href": f"{hub.endpoint}/{name}.git/info/lfs/objects/verify"}}}


@route("PUT", f"/storage/{MODEL}/(?P<oid>[0-9a-f]{{64}})/(?P<part>all|[0-9]+)")
def upload(hub: Hub, asked: Asked, name: str, oid: str, part: str) -> Reply:
    on_storage(asked)
    if part == "all":
        keep_object(hub, name, oid, asked.body)
    else:
        hub.parts[oid, int(part)] = asked.body
    return Reply(headers={"ETag": f'"{md5(asked.body).hexdigest()}"'})


@route("POST", f"/storage/{MODEL}/(?P<oid>[0-9a-f]{{64}})/complete")
def complete(hub: Hub, asked: Asked, name: str, oid: str) -> dict:
    on_storage(asked)
    wanted = asked.json()
    data = [hub.parts.get((oid, part["partNumber"]), b"") for part in wanted["parts"]]
    sums = [part["etag"].strip('"') for part in wanted["parts"]]
    if wanted["oid"] != oid or sums != [md5(part).hexdigest() for part in data]:
        raise Refused(400, "these parts did not arrive")
    keep_object(hub, name, oid, b"".join(data))
    return {}


def keep_object(hub: Hub, name: str, oid: str, data: bytes) -> None:
    if sha256(data).hexdigest() != oid:
        raise Refused(400, f"{oid} is not the checksum of what arrived")
    hub.repos[name].objects[oid] = data


def on_storage(asked: Asked) -> None:
    """The storage is not the Hub: who comes has a signed address, and a token that comes here has been given away."""
    if asked.token is not None or "signature" not in asked.query:
        raise Refused(400, "only one authorization is allowed")


@route("POST", f"/{MODEL}.git/info/lfs/objects/verify")
def verify(hub: Hub, asked: Asked, name: str) -> dict:
    repo, wanted = hub.repo(name, asked.user), asked.json()
    if len(repo.objects.get(wanted["oid"], b"")) != wanted["size"]:
        raise Refused(400, "this object did not arrive")
    return {}


@route("POST", f"/api/models/{MODEL}/commit/(?P<revision>[^/]+)")
def make_commit(hub: Hub, asked: Asked, name: str, revision: str) -> dict:
    opens = "create_pr" in asked.query
    repo, before = hub.commit(name, revision, asked.user, write=not opens)
    if revision not in repo.refs:
        raise Refused(404, f"{revision} is no branch", "RevisionNotFound")
    if asked.user is None:
        raise Refused(401, "Invalid username or password.")
    lines = [json.loads(line) for line in asked.body.splitlines()]
    header, files = lines[0]["value"], dict(before.files)
    if not opens and header.get("parentCommit") and not before.oid.startswith(header["parentCommit"]):
        raise Refused(412, STALE)
    for line in lines[1:]:
        change(repo, files, line["key"], line["value"])
    card = files.get("README.md")
    if card and (wrong := card_problems(card.data.decode())[0]):
        raise Refused(400, f"Invalid metadata in README.md: {wrong[0]}")
    number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
    ref = f"refs/pr/{number}" if opens else revision
    made = Commit(files, header["summary"], asked.user.name, before.oid, header.get("description", ""))
    repo.add(ref, made)
    place = f"{hub.endpoint}/{name}"
    told = {"success": True, "commitOid": made.oid, "commitUrl": f"{place}/commit/{made.oid}", "hookOutput": ""}
    return told | ({"pullRequestUrl": f"{place}/discussions/{number}"} if opens else {})


def change(repo: Repo, files: dict[str, Blob], kind: str, told: dict) -> None:
    """One line of a commit."""
    path = told["path"]
    if kind == "file":
        data = base64.b64decode(told["content"], validate=True)
        if len(data) > REGULAR:
            raise Refused(400, f"{path} is too large for a commit")
        files[path] = Blob(data)
    elif kind == "lfsFile":
        data = repo.objects.get(told["oid"])
        if data is None or len(data) != told["size"]:
            raise Refused(400, f"{path} points to a large object that did not arrive: {told['oid']}")
        files[path] = Blob(data, large=True)
    elif kind in ("deletedFile", "deletedFolder"):
        gone = [file for file in files if file == path or (kind == "deletedFolder" and file.startswith(path))]
        if not gone:
            raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for file in gone:
            del files[file]
    else:
        raise Refused(400, f"unknown operation {kind}")


@route("GET HEAD", f"/{MODEL}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(hub: Hub, asked: Asked, name: str, revision: str, path: str) -> Reply:
    repo, commit = hub.commit(name, revision, asked.user)
    if repo.gated and not (asked.user and asked.user.name in (*repo.members, name.partition("/")[0])):
        where = f"{hub.endpoint}/{name}"
        raise Refused(403 if asked.user else 401, f"Access to model {name} is restricted: visit {where}", "GatedRepo")
    headers = {"X-Repo-Commit": commit.oid}
    blob = commit.files.get(path)
    if blob is None:
        refused = Refused(404, f"{path} is not in {name}", "EntryNotFound")
        refused.reply.headers |= headers
        raise refused
    if not blob.large:
        return Reply(data=blob.data, headers=headers | {"ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"})
    if hub.xet and blob.sha256 in hub.xet.hashes:
        access = f'<{hub.endpoint}/api/models/{name}/xet-read-token/{commit.oid}>; rel="xet-auth"'
        headers |= {"X-Xet-Hash": hub.xet.hashes[blob.sha256], "Link": access}
    headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
    return Reply(302, headers=headers | {"Location": f"{hub.storage}/{name}/{blob.sha256}?signature=short-lived"})


@route("GET HEAD", f"/storage/{MODEL}/(?P<oid>[0-9a-f]{{64}})")
def stored(hub: Hub, asked: Asked, name: str, oid: str) -> Reply:
    on_storage(asked)
    return Reply(data=hub.repos[name].objects[oid], headers={"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})
