"""A small Hub on loopback: the calls that huggingface_hub makes to push a model repository and to fetch it again."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote

import datasets
import pytest
import yaml
from huggingface_hub import constants, hf_api

TOKEN = "hf_loopback_token"
LICENSES = {"apache-2.0", "mit", "llama3.2", "other"}
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Repository:
    """Its files and the ids of its commits, newest last; the Hub begins each with a commit of its own."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


@dataclass
class Hub:
    """What the server holds and was asked.

    `refuse` may answer a request ("POST /api/repos/create") with a status, or with 0: the connection is closed.
    """

    namespaces: tuple[str, ...] = ("ann", "lab")
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[tuple[str, str], bytes] = field(default_factory=dict)  # by repository and SHA-256
    requests: list[str] = field(default_factory=list)
    refuse: Callable[[str], int | None] = lambda request: None
    url: str = ""

    def commits(self) -> int:
        """How many commits were pushed."""
        return sum(len(repository.commits) - 1 for repository in self.repositories.values())

    def answer(self, method: str, path: str, body: bytes, token: str) -> Answer:
        request = f"{method} {path.split('?')[0]}"
        self.requests.append(request)
        if (status := self.refuse(request)) is not None:
            return reply({"error": "no more today"}, status)
        if token != TOKEN:
            return reply(
                {"error": "bad token"}, 401, **{"X-Error-Message": "Invalid credentials in Authorization header"}
            )
        for pattern, handle in self.routes.items():
            if match := re.fullmatch(pattern, request):
                return handle(self, body, **{key: value for key, value in match.groupdict().items() if value})
        return reply({"error": request}, 404)

    def whoami(self, body: bytes) -> Answer:
        return reply({"name": "ann", "type": "user", "orgs": [{"name": "lab"}]})

    def create(self, body: bytes) -> Answer:
        asked = json.loads(body)
        id = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in self.namespaces:
            return reply({"error": f"You don't have the rights to create a model under {asked['organization']}"}, 403)
        if id.lower() in (name.lower() for name in self.repositories):
            return reply({"url": f"{self.url}/{id}", "error": "You already created this model repo"}, 409)
        private = asked.get("visibility") == "private" or asked.get("private", False)  # by version of the library
        self.repositories[id] = Repository(private)
        return reply({"url": f"{self.url}/{id}"})

    def validate(self, body: bytes) -> Answer:
        license = yaml.safe_load(json.loads(body)["content"].split("---")[1]).get("license")
        errors = [] if license in LICENSES else [{"message": f'"license" must be one of {sorted(LICENSES)}'}]
        return reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def info(self, body: bytes, id: str, revision: str = "main") -> Answer:
        if id not in self.repositories:
            return reply({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        repository = self.repositories[id]
        return reply({"id": id, "modelId": id, "sha": repository.commits[-1], "private": repository.private})

    def preupload(self, body: bytes, id: str) -> Answer:
        files = self.repositories[id].files
        return reply({"files": [
            {"path": path, "uploadMode": "lfs" if is_large(path) else "regular", "shouldIgnore": False}
            | ({"oid": oid(path, files[path])} if path in files else {})
            for path in (file["path"] for file in json.loads(body)["files"])
        ]})  # fmt: skip

    def batch(self, body: bytes, id: str) -> Answer:
        objects = json.loads(body)["objects"]
        for item in objects:
            if (id, item["oid"]) not in self.large:
                item["actions"] = {"upload": {"href": f"{self.url}/large/{id}/{item['oid']}"}}
        return reply({"transfer": "basic", "objects": objects})

    def put(self, body: bytes, id: str, sha: str) -> Answer:
        assert hashlib.sha256(body).hexdigest() == sha
        self.large[id, sha] = body
        return reply({})

    def commit(self, body: bytes, id: str) -> Answer:
        repository = self.repositories[id]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.large[id, value["oid"]]
        repository.commits.append(hashlib.sha1(body + repository.commits[-1].encode()).hexdigest())
        return reply({"commitUrl": f"{self.url}/{id}/commit/1", "commitOid": repository.commits[-1]})

    def tree(self, body: bytes, id: str) -> Answer:
        return reply([
            {"type": "file", "path": path, "size": len(data), "oid": oid(path, data)}
            | ({"lfs": {"oid": oid(path, data), "size": len(data), "pointerSize": 1}} if is_large(path) else {})
            for path, data in self.repositories[id].files.items()
        ])  # fmt: skip

    def data_info(self, body: bytes, id: str, revision: str = "main") -> Answer:
        repository = self.repositories.get(f"datasets/{id}")
        if repository is None:
            return reply({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        names = [{"rfilename": path} for path in repository.files]
        return reply({"id": id, "sha": repository.commits[-1], "private": repository.private, "siblings": names})

    def data_paths(self, body: bytes, id: str, path: str = "") -> Answer:
        """What lies within a folder, or what is at the paths that are asked for."""
        files = self.repositories[f"datasets/{id}"].files
        asked = [unquote(value) for key, value in parse_qsl(body.decode()) if key == "paths"] or None
        folders = {parent: 0 for name in files for parent in map(str, PurePosixPath(name).parents) if parent != "."}
        entries = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders] + [
            {"type": "file", "path": name, "size": len(data), "oid": oid(name, data)} for name, data in files.items()
        ]
        inner = f"{path}/" if path else ""
        return reply([each for each in entries if (each["path"] in asked if asked else each["path"].startswith(inner))])

    def data_file(self, body: bytes, id: str, path: str) -> Answer:
        return self.resolve(body, f"datasets/{id}", path)

    def resolve(self, body: bytes, id: str, path: str) -> Answer:
        repository = self.repositories.get(id, Repository(False))
        if path not in repository.files:
            code = "EntryNotFound" if id in self.repositories else "RepoNotFound"
            return reply({}, 404, **{"X-Error-Code": code, "X-Repo-Commit": repository.commits[-1]})
        data = repository.files[path]
        return 200, {"X-Repo-Commit": repository.commits[-1], "ETag": f'"{oid(path, data)}"'}, data

    routes = {
        r"GET /api/whoami-v2": whoami,
        r"POST /api/repos/create": create,
        r"POST /api/validate-yaml": validate,
        r"GET /api/models/(?P<id>[^/]+/[^/]+)(/revision/(?P<revision>\w+))?": info,
        r"POST /api/models/(?P<id>[^/]+/[^/]+)/preupload/main": preupload,
        r"POST /(?P<id>[^/]+/[^/]+)\.git/info/lfs/objects/batch": batch,
        r"PUT /large/(?P<id>[^/]+/[^/]+)/(?P<sha>\w+)": put,
        r"POST /api/models/(?P<id>[^/]+/[^/]+)/commit/main": commit,
        r"GET /api/models/(?P<id>[^/]+/[^/]+)/tree/\w+": tree,
        r"GET /api/datasets/(?P<id>[^/]+/[^/]+)(/revision/(?P<revision>\w+))?": data_info,
        r"GET /api/datasets/(?P<id>[^/]+/[^/]+)/tree/\w+(/(?P<path>.+))?": data_paths,
        r"POST /api/datasets/(?P<id>[^/]+/[^/]+)/paths-info/\w+": data_paths,
        r"(GET|HEAD) /datasets/(?P<id>[^/]+/[^/]+)/resolve/\w+/(?P<path>.+)": data_file,
        r"(GET|HEAD) /(?P<id>[^/]+/[^/]+)/resolve/\w+/(?P<path>.+)": resolve,
    }


def reply(value: Any, status: int = 200, **headers: str) -> Answer:
    return status, {"Content-Type": "application/json", **headers}, json.dumps(value).encode()


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def oid(path: str, data: bytes) -> str:
    """What names a file's content: SHA-256 of a large file, git's hash of another."""
    return (
        hashlib.sha256(data).hexdigest()
        if is_large(path)
        else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    )


@contextmanager
def connected(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """A Hub that huggingface_hub in this process talks to, with a valid token and an empty cache in a folder."""
    hub = Hub()
    with serving(hub):
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(hf_api.api, "endpoint", hub.url)  # which PEFT asks whether a file exists
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", TOKEN)
        yield hub


@contextmanager
def serving(hub: Hub) -> Iterator[None]:
    """The hub at `hub.url`, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer in one packet

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if self.command == "PUT":  # huggingface_hub sends no token to the store of large files
                token = TOKEN
            status, headers, data = hub.answer(self.command, self.path, body, token)
            if not status:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = handle_one

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
