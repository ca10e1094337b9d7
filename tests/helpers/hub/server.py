"""A local Hugging Face Hub for the real client, which answers requests from memory.

It implements whoami, creation of repositories, branches and pull requests, `preupload`, large objects (in one part or
several), commits, paged listings, and files with ranges. It validates requests like the Hub, and a commit is visible
only when it is complete. Tests inject failures (`Fault`) and read the requests (`Hub.log`). As on the Hub, large
objects are on another host, which must never receive an access token.
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

from tests.helpers.hub.http_handler import (
    MODEL,
    ROUTES,
    Fault,
    Handler,
    LoggedRequest,
    Reply,
    Request,
    RequestError,
    route,
)
from tests.helpers.hub.repositories import NAME, REGULAR, Blob, Commit, Repo, card_problems, first_commit, is_id
from tests.helpers.hub.xet_storage import Store

STALE = "A commit has happened since. Please refresh and try again."


@dataclass(frozen=True)
class User:
    """The owner of a token and whether it has write access. `orgs`: organizations that it can write to."""

    name: str
    writes: bool = True
    orgs: tuple[str, ...] = ()


class Hub:
    """A Hub that runs inside `with Hub() as hub:` at `hub.endpoint`."""

    def __init__(self, tokens: dict[str, User] | None = None) -> None:
        self.tokens = tokens or {}
        self.repos: dict[str, Repo] = {}
        self.log: list[LoggedRequest] = []
        self.faults: list[Fault] = []
        self.parts: dict[tuple[str, int], bytes] = {}  # of multipart uploads
        self.page, self.part = 1000, 2**40  # entries on a page of a listing, bytes of a part
        self.xet: Store | None = None  # stores large objects instead of git LFS if set
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
        """Create a repository with these files, or add a commit to it."""
        repo = self.repos.setdefault(name, Repo(name, **options))
        owner = name.partition("/")[0]
        before = repo.find("main") or repo.add("main", first_commit(owner))
        blobs = {path: Blob(data, repo.is_large(path, len(data), before)) for path, data in files.items()}
        repo.objects |= {blob.sha256: blob.data for blob in blobs.values() if blob.large}
        repo.add("main", Commit({**before.files, **blobs}, "add files", owner, before.oid))
        return repo

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            return next((fault for fault in self.faults if fault.fits(method, path)), None)

    def seen(self, method: str = ".*", path: str = "") -> list[LoggedRequest]:
        """Requests by method and path."""
        return [
            request for request in self.log if re.fullmatch(method, request.method) and re.search(path, request.path)
        ]

    def answer(self, method: str, path: str, request: Request) -> Reply:
        """Answer a request, without injected failures."""
        if (
            request.token is not None
            and request.token not in self.tokens
            and not path.startswith(("/storage/", "/xet/"))
        ):
            raise RequestError(401, "Invalid credentials in Authorization header")
        request.user = self.tokens.get(request.token or "")
        path = path.replace("/datasets/", "/models/" if path.startswith("/api/") else "/", 1)  # stored the same way
        with self.lock:
            for verbs, pattern, handler in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method in verbs:
                    result = handler(
                        self, request, **{key: unquote(value) for key, value in match.groupdict("").items()}
                    )
                    return result if isinstance(result, Reply) else Reply(data=json.dumps(result).encode())
            raise RequestError(404, f"no such page: {method} {path}")

    def repo(self, name: str, user: User | None, write: bool = False) -> Repo:
        """Find a repository that this user can read, or write to."""
        repo = self.repos.get(name)
        owner = name.partition("/")[0]
        is_owner = user is not None and owner in (user.name, *user.orgs)
        if repo is None or (repo.private and not is_owner and not (user and user.name in repo.members)):
            code = 404 if user else 401  # anonymous users do not learn whether it exists
            raise RequestError(
                code, "Repository not found" if user else "Invalid username or password.", "RepoNotFound"
            )
        if write and not (is_owner and user and user.writes):
            raise RequestError(403 if user else 401, "you don't have write permission on this repository")
        return repo

    def commit(self, name: str, revision: str, user: User | None, write: bool = False) -> tuple[Repo, Commit]:
        repo = self.repo(name, user, write)
        commit = repo.find(revision)
        if commit is None:
            raise RequestError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, commit


@route("GET", "/api/whoami-v2")
def whoami(hub: Hub, request: Request) -> dict:
    if request.user is None:
        raise RequestError(401, "Invalid username or password.")
    role = {"displayName": "test", "role": "write" if request.user.writes else "read"}
    orgs = [{"name": org, "roleInOrg": "write"} for org in request.user.orgs]
    return {"type": "user", "name": request.user.name, "orgs": orgs, "auth": {"accessToken": role}}


@route("POST", "/api/repos/create")
def create(hub: Hub, request: Request) -> dict:
    options, user = request.json(), request.user
    if user is None:
        raise RequestError(401, "Invalid username or password.")
    owner = options.get("organization") or user.name
    name = f"{owner}/{options['name']}"
    if not is_id(name) or not NAME.fullmatch(options["name"]) or name.endswith(".git"):
        raise RequestError(400, f"Invalid model name: {options['name']}")
    if not user.writes or owner not in (user.name, *user.orgs):
        raise RequestError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
    url = f"{hub.endpoint}/{name}"
    if name in hub.repos:
        raise RequestError(409, "You already created this model repo", url=url)
    private = options.get("private") or options.get("visibility") == "private"
    hub.repos[name] = repo = Repo(name, bool(private))
    repo.add("main", first_commit(user.name))
    return {"url": url, "name": name, "id": name}


@route("POST", "/api/validate-yaml")
def validate(hub: Hub, request: Request) -> Reply:
    errors, warnings = card_problems(request.json()["content"])
    problems = {"errors": [{"message": line} for line in errors], "warnings": [{"message": line} for line in warnings]}
    return Reply(400 if errors else 200, json.dumps(problems).encode())


@route("GET", f"/api/models/{MODEL}(?:/revision/(?P<revision>[^/]+))?")
def model(hub: Hub, request: Request, name: str, revision: str) -> dict:
    repo, commit = hub.commit(name, revision or "main", request.user)
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    if "blobs" in request.query:
        siblings = [blob.sibling(path) for path, blob in sorted(commit.files.items())]
    info = {"_id": "0", "id": name, "modelId": name, "sha": commit.oid, "siblings": siblings, "tags": []}
    info |= {"private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False}
    return info | {"author": name.partition("/")[0], "lastModified": commit.date, "downloads": 0, "likes": 0}


@route("GET", f"/api/models/{MODEL}/refs")
def refs(hub: Hub, request: Request, name: str) -> dict:
    repo = hub.repo(name, request.user)
    full = {ref if "/" in ref else f"refs/heads/{ref}": oid for ref, oid in repo.refs.items()}
    full |= {f"refs/tags/{tag}": oid for tag, oid in repo.tags.items()}
    entries = [{"ref": ref, "name": ref.split("/", 2)[2], "targetCommit": oid} for ref, oid in full.items()]
    kinds = {"branches": "refs/heads/", "tags": "refs/tags/", "converts": "refs/convert/"}
    kinds |= {"pullRequests": "refs/pr/"} if "include_prs" in request.query else {}
    return {kind: [ref for ref in entries if ref["ref"].startswith(start)] for kind, start in kinds.items()}


@route("GET", f"/api/models/{MODEL}/commits/(?P<revision>[^/]+)")
def commits(hub: Hub, request: Request, name: str, revision: str) -> Reply:
    repo, _ = hub.commit(name, revision, request.user)
    entries = [{"id": commit.oid, "title": commit.title, "message": commit.description, "date": commit.date,
             "authors": [{"user": commit.author}]} for commit in repo.history(revision)]  # fmt: skip
    return pages(hub, request, f"/api/models/{name}/commits/{quote(revision, safe='')}", entries)


@route("GET", f"/api/models/{MODEL}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?")
def tree(hub: Hub, request: Request, name: str, revision: str, path: str) -> Reply:
    _, commit = hub.commit(name, revision, request.user)
    start = f"{path.rstrip('/')}/" if path else ""
    inside = {file: blob for file, blob in commit.files.items() if file.startswith(start)}
    if path and not inside:
        raise RequestError(404, f"{path} does not exist on {revision!r}", "EntryNotFound")
    folders = {
        file[: len(start) + cut] for file in inside for cut, sign in enumerate(file[len(start) :]) if sign == "/"
    }
    entries = [{"type": "directory", "oid": commit.oid, "size": 0, "path": folder} for folder in folders]
    entries += [blob.entry(file) for file, blob in inside.items()]
    if request.query.get("recursive", ["false"])[0].lower() not in ("true", "1"):
        entries = [entry for entry in entries if "/" not in entry["path"][len(start) :]]
    return pages(
        hub, request, f"/api/models/{name}/tree/{quote(revision, safe='')}", sorted(entries, key=lambda e: e["path"])
    )


def pages(hub: Hub, request: Request, path: str, rows: list[dict]) -> Reply:
    """Reply with one page and a link to the next one."""
    first = int(request.query.get("cursor", ["0"])[0])
    query = "&".join(f"{key}={values[0]}" for key, values in request.query.items() if key != "cursor")
    next_link = f'<{hub.endpoint}{path}?{query}&cursor={first + hub.page}>; rel="next"'
    headers = {"Link": next_link} if first + hub.page < len(rows) else {}
    return Reply(data=json.dumps(rows[first : first + hub.page]).encode(), headers=headers)


@route("POST", f"/api/models/{MODEL}/paths-info/(?P<revision>[^/]+)")
def paths_info(hub: Hub, request: Request, name: str, revision: str) -> list[dict]:
    _, commit = hub.commit(name, revision, request.user)
    paths = parse_qs(request.body.decode()).get("paths", [])
    return [commit.files[path].entry(path) for path in paths if path in commit.files]


@route("POST", f"/api/models/{MODEL}/branch/(?P<branch>[^/]+)")
def branch(hub: Hub, request: Request, name: str, branch: str) -> dict:
    repo, commit = hub.commit(name, request.json().get("startingPoint") or "main", request.user, write=True)
    if branch in repo.refs:
        raise RequestError(409, f"Reference already exists: refs/heads/{branch}")
    repo.refs[branch] = commit.oid
    return {}


@route("POST", f"/api/models/{MODEL}/preupload/(?P<revision>[^/]+)")
def preupload(hub: Hub, request: Request, name: str, revision: str) -> dict:
    repo, commit = hub.commit(name, revision, request.user, write="create_pr" not in request.query)
    rows = []
    for file in request.json()["files"]:
        large, current = repo.is_large(file["path"], file["size"], commit), commit.files.get(file["path"])
        row = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        rows.append(row | ({"oid": current.etag} if current else {}))
    return {"files": rows}


@route("POST", f"/{MODEL}.git/info/lfs/objects/batch")
def batch(hub: Hub, request: Request, name: str) -> dict:
    repo = hub.repo(name, request.user)
    options = request.json()
    assert options["operation"] == "upload" and options["hash_algo"] == "sha256"
    sizes = sum(len(data) for data in repo.objects.values())
    if sizes + sum(item["size"] for item in options["objects"] if item["oid"] not in repo.objects) > hub.quota:
        raise RequestError(403, "Private repository storage limit reached, please upgrade your plan")
    if hub.xet is not None and "xet" in options["transfers"]:  # older clients ask; newer ones always use Xet
        return {"transfer": "xet", "objects": options["objects"]}
    objects = [
        item | ({} if item["oid"] in repo.objects else actions(hub, name, **item)) for item in options["objects"]
    ]
    return {"transfer": "multipart" if hub.part < 2**40 else "basic", "objects": objects}


def actions(hub: Hub, name: str, oid: str, size: int) -> dict:
    """URLs for the upload of a large object, in one part or several."""
    url = f"{hub.storage}/{name}/{oid}"
    parts = range(1, -(-size // hub.part) + 1)
    multipart = {"chunk_size": str(hub.part), **{str(n): f"{url}/{n}?signature=short-lived" for n in parts}}
    single = {"href": f"{url}/all?size={size}&signature=short-lived"}
    upload = single if len(parts) == 1 else {"href": f"{url}/complete?signature=short-lived", "header": multipart}
    return {"actions": {"upload": upload, "verify": {"href": f"{hub.endpoint}/{name}.git/info/lfs/objects/verify"}}}


@route("PUT", f"/storage/{MODEL}/(?P<oid>[0-9a-f]{{64}})/(?P<part>all|[0-9]+)")
def upload(hub: Hub, request: Request, name: str, oid: str, part: str) -> Reply:
    require_signed_url(request)
    if part == "all":
        keep_object(hub, name, oid, request.body)
    else:
        hub.parts[oid, int(part)] = request.body
    return Reply(headers={"ETag": f'"{md5(request.body).hexdigest()}"'})


@route("POST", f"/storage/{MODEL}/(?P<oid>[0-9a-f]{{64}})/complete")
def complete(hub: Hub, request: Request, name: str, oid: str) -> dict:
    require_signed_url(request)
    options = request.json()
    data = [hub.parts.get((oid, part["partNumber"]), b"") for part in options["parts"]]
    sums = [part["etag"].strip('"') for part in options["parts"]]
    if options["oid"] != oid or sums != [md5(part).hexdigest() for part in data]:
        raise RequestError(400, "missing parts")
    keep_object(hub, name, oid, b"".join(data))
    return {}


def keep_object(hub: Hub, name: str, oid: str, data: bytes) -> None:
    if sha256(data).hexdigest() != oid:
        raise RequestError(400, f"checksum mismatch: {oid}")
    hub.repos[name].objects[oid] = data


def require_signed_url(request: Request) -> None:
    """Require a signed URL. The storage is not the Hub: an access token must not be sent to it."""
    if request.token is not None or "signature" not in request.query:
        raise RequestError(400, "only one authorization is allowed")


@route("POST", f"/{MODEL}.git/info/lfs/objects/verify")
def verify(hub: Hub, request: Request, name: str) -> dict:
    repo, expected = hub.repo(name, request.user), request.json()
    if len(repo.objects.get(expected["oid"], b"")) != expected["size"]:
        raise RequestError(400, "object not uploaded")
    return {}


@route("POST", f"/api/models/{MODEL}/commit/(?P<revision>[^/]+)")
def make_commit(hub: Hub, request: Request, name: str, revision: str) -> dict:
    creates_pr = "create_pr" in request.query
    repo, before = hub.commit(name, revision, request.user, write=not creates_pr)
    if revision not in repo.refs:
        raise RequestError(404, f"{revision} is no branch", "RevisionNotFound")
    if request.user is None:
        raise RequestError(401, "Invalid username or password.")
    lines = [json.loads(line) for line in request.body.splitlines()]
    header, files = lines[0]["value"], dict(before.files)
    if not creates_pr and header.get("parentCommit") and not before.oid.startswith(header["parentCommit"]):
        raise RequestError(412, STALE)
    for line in lines[1:]:
        change(repo, files, line["key"], line["value"])
    card = files.get("README.md")
    if card and (errors := card_problems(card.data.decode())[0]):
        raise RequestError(400, f"Invalid metadata in README.md: {errors[0]}")
    number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
    ref = f"refs/pr/{number}" if creates_pr else revision
    commit = Commit(files, header["summary"], request.user.name, before.oid, header.get("description", ""))
    repo.add(ref, commit)
    url = f"{hub.endpoint}/{name}"
    result = {"success": True, "commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}", "hookOutput": ""}
    return result | ({"pullRequestUrl": f"{url}/discussions/{number}"} if creates_pr else {})


def change(repo: Repo, files: dict[str, Blob], kind: str, entry: dict) -> None:
    """Apply one line of a commit."""
    path = entry["path"]
    if kind == "file":
        data = base64.b64decode(entry["content"], validate=True)
        if len(data) > REGULAR:
            raise RequestError(400, f"{path} is too large for a commit")
        files[path] = Blob(data)
    elif kind == "lfsFile":
        data = repo.objects.get(entry["oid"])
        if data is None or len(data) != entry["size"]:
            raise RequestError(400, f"{path} points to a large object that was not uploaded: {entry['oid']}")
        files[path] = Blob(data, large=True)
    elif kind in ("deletedFile", "deletedFolder"):
        deleted = [file for file in files if file == path or (kind == "deletedFolder" and file.startswith(path))]
        if not deleted:
            raise RequestError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for file in deleted:
            del files[file]
    else:
        raise RequestError(400, f"unknown operation {kind}")


@route("GET HEAD", f"/{MODEL}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(hub: Hub, request: Request, name: str, revision: str, path: str) -> Reply:
    repo, commit = hub.commit(name, revision, request.user)
    if repo.gated and not (request.user and request.user.name in (*repo.members, name.partition("/")[0])):
        url = f"{hub.endpoint}/{name}"
        raise RequestError(
            403 if request.user else 401, f"Access to model {name} is restricted: visit {url}", "GatedRepo"
        )
    headers = {"X-Repo-Commit": commit.oid}
    blob = commit.files.get(path)
    if blob is None:
        refused = RequestError(404, f"{path} is not in {name}", "EntryNotFound")
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
def stored(hub: Hub, request: Request, name: str, oid: str) -> Reply:
    require_signed_url(request)
    return Reply(data=hub.repos[name].objects[oid], headers={"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})
