"""A stub of the Kubernetes API server, over real HTTP, for the real ``kubernetes`` client.

It stores Services, Secrets, Pods, Events, Jobs, JobSets and TrainJobs of some namespaces, and answers create, get, list (with
selectors and pages), server-side apply, merge patch, delete and log as the API's documentation says: status codes, Status
objects, text for unknown paths. It validates what it stores against the published schemas. It has no controllers: a test
creates pods and conditions itself.
"""

import contextlib
import copy
import functools
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from unit.launch.kubernetes.schemas import validate

TOKEN = "token-of-ana"
Document = dict[str, Any]

_KINDS = {
    ("", "v1", "services"): "Service",
    ("", "v1", "secrets"): "Secret",
    ("", "v1", "pods"): "Pod",
    ("", "v1", "events"): "Event",
    ("batch", "v1", "jobs"): "Job",
    ("jobset.x-k8s.io", "v1alpha2", "jobsets"): "JobSet",
    ("trainer.kubeflow.org", "v1alpha1", "trainjobs"): "TrainJob",
}
_VALIDATED = {"Service", "Secret", "Job", "JobSet", "TrainJob"}
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
# What the schemas do not have: the server adds it.
_OF_THE_SERVER = ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")


@dataclass(frozen=True)
class Target:
    """What a path names."""

    group: str
    version: str
    namespace: str
    plural: str
    name: str = ""
    part: str = ""

    @property
    def kind(self) -> str | None:
        return _KINDS.get((self.group, self.version, self.plural))

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass
class StubCluster:
    """What the API server stores, and how it misbehaves."""

    objects: dict[tuple[str, str, str], Document] = field(default_factory=dict)
    namespaces: set[str] = field(default_factory=lambda: {"default", "research"})
    installed: set[str] = field(default_factory=lambda: set(_KINDS.values()))
    forbidden: set[tuple[str, str]] = field(default_factory=set)  # verb, resource
    denied: dict[str, str] = field(default_factory=dict)  # kind -> message of a webhook or quota
    owned_by_others: set[str] = field(default_factory=set)  # kinds
    logs: dict[str, list[str]] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)  # pod -> why it has no log
    unavailable: bool = False
    stall: threading.Event | None = None  # answers wait for it
    requests: list[tuple[str, str]] = field(default_factory=list)
    page: int = 500
    log_ends: dict[str, threading.Event] = field(default_factory=dict)
    log_cuts: dict[str, int] = field(
        default_factory=dict
    )  # pod -> lines after which its connection breaks, once
    log_requested: threading.Event = field(default_factory=threading.Event)
    server: str = ""
    _version: int = 0

    def put(self, document: Document, namespace: str = "default") -> Document:
        """Store an object as a controller would, without validation."""
        self._version += 1
        stored = copy.deepcopy(document)
        metadata = stored["metadata"]
        metadata.setdefault("namespace", namespace)
        metadata.setdefault("uid", f"uid-{self._version}")
        metadata["resourceVersion"] = str(self._version)
        metadata.setdefault("creationTimestamp", "2026-11-18T12:00:00Z")
        self.objects[namespace, stored["kind"], metadata["name"]] = stored
        return stored

    def get(self, kind: str, name: str, namespace: str = "default") -> Document:
        return self.objects[namespace, kind, name]


class Problem(Exception):
    """An answer other than success, as a Status object or as plain text."""

    def __init__(
        self, code: int, reason: str, message: str, details: Document | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.body: bytes = json.dumps(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Failure",
                "message": message,
                "reason": reason,
                "details": details or {},
                "code": code,
            }
        ).encode()
        self.content_type = "application/json"


class _NoSuchPath(Problem):
    def __init__(self) -> None:
        super().__init__(404, "NotFound", "404 page not found")
        self.body, self.content_type = b"404 page not found\n", "text/plain; charset=utf-8"


def _not_found(target: Target) -> Problem:
    message = f'{target.qualified} "{target.name}" not found'
    details = {"name": target.name, "group": target.group, "kind": target.plural}
    return Problem(404, "NotFound", message, details)


def _invalid(target: Target, message: str) -> Problem:
    details = {"name": target.name, "group": target.group, "kind": target.kind}
    group = f".{target.group}" if target.group else ""
    return Problem(
        422, "Invalid", f'{target.kind}{group} "{target.name}" is invalid: {message}', details
    )


def _target(path: str) -> Target:
    parts = path.strip("/").split("/")
    if parts[:1] == ["api"]:
        group, version, *rest = "", *parts[1:]
    elif parts[:1] == ["apis"]:
        group, version, *rest = parts[1:]
    else:
        raise _NoSuchPath
    if len(rest) not in (3, 4, 5) or rest[0] != "namespaces":
        raise _NoSuchPath
    _, namespace, plural, *more = rest
    return Target(group, version, namespace, plural, *more)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for each answer
    disable_nagle_algorithm = True
    cluster: StubCluster
    connections: set[socket.socket]

    def setup(self) -> None:
        super().setup()
        self.connections.add(self.connection)

    def finish(self) -> None:
        self.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PATCH(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        try:
            if self.cluster.stall is not None:
                self.cluster.stall.wait(60)
            code, answer = self._answer(body)
        except Problem as problem:
            self._send(problem.code, problem.body, problem.content_type)
        else:
            if answer is not None:
                self._send(code, json.dumps(answer).encode(), "application/json")

    def _send(self, code: int, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, body: bytes) -> tuple[int, Document | None]:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.cluster.requests.append((self.command, self.path))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Problem(401, "Unauthorized", "Unauthorized")
        if self.cluster.unavailable:
            raise Problem(503, "ServiceUnavailable", "etcdserver: leader changed")
        target = _target(url.path)
        verb = _VERBS.get(self.command) or ("get" if target.name else "list")
        self._authorize(verb, target)
        if target.kind is None or target.kind not in self.cluster.installed:
            raise _NoSuchPath
        if target.part == "log":
            self._log(target, query)
            return 200, None
        if target.part:
            raise _NoSuchPath
        match self.command:
            case "GET":
                return 200, self._find(target) if target.name else self._list(target, query)
            case "POST":
                return 201, self._create(target, json.loads(body))
            case "DELETE":
                return 200, self._delete(target, query)
            case _:
                return self._patch(target, query, body)

    def _authorize(self, verb: str, target: Target) -> None:
        resource = f"{target.plural}/{target.part}" if target.part else target.plural
        if (verb, resource) in self.cluster.forbidden:
            named = f' "{target.name}"' if target.name else ""
            raise Problem(
                403,
                "Forbidden",
                f'{target.qualified}{named} is forbidden: User "ana" cannot {verb} resource "{resource}" '
                f'in API group "{target.group}" in the namespace "{target.namespace}"',
                {"name": target.name, "group": target.group, "kind": target.plural},
            )

    def _key(self, target: Target, name: str = "") -> tuple[str, str, str]:
        return target.namespace, str(target.kind), name or target.name

    def _find(self, target: Target) -> Document:
        if self._key(target) not in self.cluster.objects:
            raise _not_found(target)
        return self.cluster.objects[self._key(target)]

    def _list(self, target: Target, query: dict[str, str]) -> Document:
        wanted = dict(one.split("=") for one in query.get("labelSelector", "").split(",") if one)
        fields = dict(one.split("=") for one in query.get("fieldSelector", "").split(",") if one)
        items = [
            document
            for (namespace, kind, _), document in sorted(self.cluster.objects.items())
            if namespace == target.namespace
            and kind == target.kind
            and wanted.items() <= (document["metadata"].get("labels") or {}).items()
            and all(document.get(name) == value for name, value in fields.items())
        ]
        first = int(query.get("continue", "0"))
        end = first + min(int(query.get("limit", len(items) or 1)), self.cluster.page)
        metadata: Document = {"resourceVersion": "1"}
        if end < len(items):
            metadata["continue"] = str(end)
        return {"kind": f"{target.kind}List", "metadata": metadata, "items": items[first:end]}

    def _admit(self, target: Target, document: Document) -> None:
        if target.namespace not in self.cluster.namespaces:
            raise Problem(
                404,
                "NotFound",
                f'namespaces "{target.namespace}" not found',
                {"name": target.namespace, "kind": "namespaces"},
            )
        if message := self.cluster.denied.get(str(target.kind)):
            raise Problem(403, "Forbidden", message, {"kind": target.plural})
        if target.kind in _VALIDATED:
            plain = copy.deepcopy(document)
            for name in _OF_THE_SERVER:
                plain["metadata"].pop(name, None)
            plain.pop("status", None)
            plain.get("stringData", {}).update(secret="")
            if message := _mistakes(json.dumps(plain)):
                raise _invalid(target, message)

    def _create(self, target: Target, document: Document) -> Document:
        name = document["metadata"]["name"]
        self._admit(target, document)
        if self._key(target, name) in self.cluster.objects:
            message = f'{target.qualified} "{name}" already exists'
            raise Problem(409, "AlreadyExists", message, {"name": name, "kind": target.plural})
        return self.cluster.put(document, target.namespace)

    def _patch(self, target: Target, query: dict[str, str], body: bytes) -> tuple[int, Document]:
        content_type = self.headers["Content-Type"]
        patch = json.loads(body)
        before = self.cluster.objects.get(self._key(target))
        if content_type == "application/apply-patch+yaml":
            if "fieldManager" not in query:
                raise Problem(
                    400,
                    "BadRequest",
                    "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value",
                )
            if target.kind in self.cluster.owned_by_others and query.get("force") != "true":
                raise Problem(
                    409,
                    "Conflict",
                    'Apply failed with 1 conflict: conflict with "kubectl-edit" using batch/v1: .spec.parallelism',
                    {"causes": [{"reason": "FieldManagerConflict", "field": ".spec.parallelism"}]},
                )
            if before is None:
                self._admit(target, patch)
                return 201, self.cluster.put(patch, target.namespace)
            _check_immutable(target, before, patch)
        elif content_type != "application/merge-patch+json":
            raise Problem(
                415,
                "UnsupportedMediaType",
                f"the body of the request was in an unknown format - {content_type}",
            )
        elif before is None:
            raise _not_found(target)
        after = _merged(before, patch)
        self._admit(target, after)
        return 200, before if after == before else self.cluster.put(after, target.namespace)

    def _delete(self, target: Target, query: dict[str, str]) -> Document:
        document = self._find(target)
        if query.get("propagationPolicy") == "Foreground" and target.kind not in (
            "Secret",
            "Service",
        ):
            document["metadata"]["deletionTimestamp"] = "2026-11-18T12:00:00Z"
            document["metadata"]["finalizers"] = ["foregroundDeletion"]
            return document
        del self.cluster.objects[self._key(target)]
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _log(self, target: Target, query: dict[str, str]) -> None:
        self._find(target)
        if reason := self.cluster.waiting.get(target.name):
            self.cluster.log_requested.set()
            message = f'container "{query["container"]}" in pod "{target.name}" is waiting to start: {reason}'
            raise Problem(400, "BadRequest", message)
        lines = self.cluster.logs.get(target.name, [])
        times = [
            f"2026-11-18T12:00:{number // 2:02}.{'5' * (1 + number % 2)}Z"
            for number in range(len(lines))
        ]
        if query.get("timestamps") == "true":
            lines = [f"{moment} {line}" for moment, line in zip(times, lines, strict=True)]
        since = query.get("sinceTime", "").rstrip("Z")
        shown = [line for moment, line in zip(times, lines, strict=True) if moment >= since]
        cut = self.cluster.log_cuts.pop(target.name, None)
        body = "".join(f"{line}\n" for line in shown[:cut]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (body[:7], body[7:]):  # lines do not end where pieces do
            if piece:
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.flush()
        self.cluster.log_requested.set()
        if cut is not None:
            self.close_connection = True  # before the end of the answer
            return
        if query.get("follow") == "true" and (end := self.cluster.log_ends.get(target.name)):
            end.wait(60)
        self.wfile.write(b"0\r\n\r\n")


@functools.cache
def _mistakes(document: str) -> str:
    """Return what the schemas say against a document; loading them takes a second."""
    try:
        validate(json.loads(document))
    except Exception as error:
        return str(error)
    return ""


def _check_immutable(target: Target, before: Document, patch: Document) -> None:
    paths = {
        "Job": [("template",), ("completions",)],
        "JobSet": [("replicatedJobs",)],
        "TrainJob": [("trainer",), ("runtimeRef",)],
    }
    for (name,) in paths.get(str(target.kind), []):
        if _merged(before["spec"], {name: patch["spec"][name]}) != before["spec"]:
            raise _invalid(
                target, f"spec.{name}: Invalid value: {before['spec'][name]}: field is immutable"
            )


def _merged(before: Any, patch: Any) -> Any:
    """Merge as RFC 7396 says; lists are replaced."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


@contextlib.contextmanager
def stub_api_server() -> Iterator[StubCluster]:
    """Serve a cluster at a free port of loopback."""
    cluster = StubCluster()
    connections: set[socket.socket] = set()
    handler = type("Handler", (_Handler,), {"cluster": cluster, "connections": connections})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    cluster.server = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield cluster
    finally:
        for event in (cluster.stall, *cluster.log_ends.values()):
            if event is not None:
                event.set()
        server.shutdown()
        thread.join()
        for connection in list(connections):  # which the client has not closed yet
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()
