"""Requests to the API server of a Kubernetes cluster, with the ``kubernetes`` package (extra ``kubernetes``).

Objects are the plain dictionaries of the API, so that a newer cluster's unknown fields and values do no harm.
"""

import contextlib
import difflib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.schedulers.kubernetes.manifests import Document
from torchmuster.redaction import harmless

FIELD_MANAGER = "torchmuster"

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_SAY_EVERY_S = 5.0
# The API server's clients list in pages, so that no answer takes long.
_PAGE = 500
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LONGEST_REASON = 600


@dataclass(frozen=True)
class Resource:
    """A type of objects: its kind, and its path in the API."""

    kind: str
    plural: str
    group: str = ""
    version: str = "v1"

    def path(self, namespace: str, name: str = "", part: str = "") -> str:
        """Return the path of all objects of a namespace, of one object, or of a part of it."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        words = [root, "namespaces", quote(namespace), self.plural, quote(name), part]
        return "/".join(word for word in words if word)

    def named(self, name: str) -> str:
        """Return how kubectl names an object: ``job.batch/train``."""
        return f"{self.kind.lower()}{f'.{self.group}' if self.group else ''}/{name}"


SERVICE = Resource("Service", "services")
SECRET = Resource("Secret", "secrets")
POD = Resource("Pod", "pods")
EVENT = Resource("Event", "events")
JOB = Resource("Job", "jobs", "batch", "v1")
JOBSET = Resource("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2")
TRAINJOB = Resource("TrainJob", "trainjobs", "trainer.kubeflow.org", "v1alpha1")
JOB_RESOURCES = (JOB, JOBSET, TRAINJOB)
_RESOURCES = {one.kind: one for one in (SERVICE, SECRET, *JOB_RESOURCES)}


def resource_of(document: Mapping[str, Any]) -> Resource:
    """Return the type of a manifest."""
    return _RESOURCES[document["kind"]]


class Refused(Exception):
    """An answer of the API server other than success."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.details: Document = {}
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and answer.get("kind") == "Status":
            self.details = answer.get("details") or {}
            body = str(answer.get("message") or answer.get("reason") or body)
        self.message = harmless(body.strip()) or f"HTTP status {status}"

    @property
    def is_permission(self) -> bool:
        """Whether the user lacks a permission; quotas and admission webhooks also answer 403."""
        return self.status == 403 and "cannot " in self.message and " resource " in self.message

    @property
    def is_unknown_type(self) -> bool:
        """Whether the API server does not have this type of objects."""
        return self.status == 404 and not self.details


class Cluster:
    """The API server of a cluster, and the namespace to work in."""

    def __init__(
        self,
        client: Any,
        *,
        namespace: str,
        context: str | None = None,
        flags: str = "",
        credentials: str = "",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        from kubernetes.dynamic import DynamicClient

        self.server: str = client.configuration.host
        self.namespace = namespace
        self.context = context
        self._flags = flags  # --context and --namespace as given
        self._credentials = credentials  # why they could not be read, if so
        self._say = say
        self._client = client
        # Its discovery is not needed: all paths are known.
        self._requests = DynamicClient(client, discoverer=lambda *_: None)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def kubectl(self, command: str) -> str:
        """Return a kubectl command line for this context and namespace."""
        context = f" --context {self.context}" if self.context else ""
        return f"kubectl{context} --namespace {self.namespace} {command}"

    def muster(self, action: str, name: str, more: str = "") -> str:
        """Return a command line of Muster for a job in this context and namespace."""
        return f"muster kubernetes {action} {name}{self._flags}{f' {more}' if more else ''}"

    def find(self, resource: Resource, name: str) -> Document | None:
        """Return an object; None if there is none."""
        try:
            return self._json("get", "get", resource, name)
        except Refused as refused:
            if refused.status == 404 and not refused.is_unknown_type:
                return None
            raise self.error(refused, "get", resource, name) from None

    def list_all(
        self,
        resource: Resource,
        *,
        labels: Mapping[str, str] | None = None,
        fields: str | None = None,
    ) -> list[Document]:
        """Return the objects with these labels and fields; raise Refused if the server does not list them."""
        selector = ",".join(f"{name}={value}" for name, value in (labels or {}).items()) or None
        found: list[Document] = []
        token: str | None = None
        while True:
            page = self._json(
                "get",
                "list",
                resource,
                label_selector=selector,
                field_selector=fields,
                limit=_PAGE,
                _continue=token,
            )
            found += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return found

    def create(self, resource: Resource, document: Document) -> bool:
        """Create an object; return False if it exists."""
        name = document["metadata"]["name"]
        try:
            self._json("post", "create", resource, body=document)
        except Refused as refused:
            if refused.status == 409:
                return False
            raise self.error(refused, "create", resource, name) from None
        return True

    def apply(self, document: Document) -> Document:
        """Create or change an object by server-side apply; return it."""
        resource, name = resource_of(document), document["metadata"]["name"]
        try:
            return self._json(
                "patch",
                "patch",
                resource,
                name,
                body=document,
                content_type="application/apply-patch+yaml",
                field_manager=FIELD_MANAGER,
            )
        except Refused as refused:
            # Applying a new object needs both permissions.
            raise self.error(refused, "patch", resource, name, ("create", "patch")) from None

    def change(self, resource: Resource, name: str, change: Document) -> Document:
        """Merge a change into an object; None removes a field."""
        try:
            return self._json(
                "patch",
                "patch",
                resource,
                name,
                body=change,
                content_type="application/merge-patch+json",
                field_manager=FIELD_MANAGER,
            )
        except Refused as refused:
            raise self.error(refused, "patch", resource, name) from None

    def delete(self, resource: Resource, name: str) -> bool:
        """Delete an object and, before it, what depends on it; return False if there is none."""
        try:
            self._json("delete", "delete", resource, name, propagation_policy="Foreground")
        except Refused as refused:
            if refused.status == 404:
                return False
            raise self.error(refused, "delete", resource, name) from None
        return True

    def open_log(self, pod: str, container: str, *, follow: bool = False, since: str = "") -> Any:
        """Return the open response with a container's log; raise Refused if there is none yet.

        Each line of a log that is followed begins with its time, and ``since`` is the time of the last known line.
        """
        query = [("container", container)]
        if follow:
            query += [("follow", "true"), ("timestamps", "true")]
        if since:
            query.append(("sinceTime", f"{since.rstrip('Z').partition('.')[0]}Z"))  # full seconds
        return self._answer(
            "get",
            "get",
            POD,
            pod,
            "log",
            query_params=query,
            header_params={"Accept": "*/*"},
            # A log that is followed may be silent for long.
            _request_timeout=(_CONNECT_S, None if follow else _ANSWER_S),
        )

    def _json(
        self, method: str, verb: str, resource: Resource, name: str = "", **options: Any
    ) -> Document:
        answer = self._answer(method, verb, resource, name, **options)
        with self._naming(verb, resource, name):
            document: Document = json.loads(answer.data)
        return document

    def _answer(
        self,
        method: str,
        verb: str,
        resource: Resource,
        name: str = "",
        part: str = "",
        **options: Any,
    ) -> Any:
        from kubernetes.client.exceptions import ApiException
        from kubernetes.dynamic.exceptions import DynamicApiError

        options = dict(_request_timeout=(_CONNECT_S, _ANSWER_S)) | options  # noqa: C408  the client's own name
        path = resource.path(self.namespace, name, part)
        with self._naming(verb, resource, name):
            try:
                return self._requests.request(method, path, serialize=False, **options)
            except (ApiException, DynamicApiError) as error:
                body = error.body or ""
                text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
                if not error.status:  # the connection, not an answer: TLS
                    raise self._unreachable(str(error.reason)) from None
                raise Refused(int(error.status), text) from None

    @contextlib.contextmanager
    def _naming(self, verb: str, resource: Resource, name: str) -> Iterator[None]:
        """Report a slow answer while waiting for it, and a missing one as an error."""
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        wanted = f"{verb} {resource.named(name) if name else resource.plural}"
        try:
            with notices(f"waiting for {self.server} ({wanted})", self._say):
                yield
        except ReadTimeoutError:
            raise NotNow(
                f"the API server {self.server} did not answer within {_ANSWER_S:.0f} s: {wanted}",
                why="the server or the connection to it is overloaded; the request may still be carried out",
                fix="run the same command again",
            ) from None
        except HTTPError as error:
            raise self._unreachable(str(getattr(error, "reason", None) or error)) from None
        except ValueError:
            raise MusterError(
                f"the answer of {self.server} is not JSON: {wanted}",
                why="something other than a Kubernetes API server answers at this address",
                fix=self.kubectl("cluster-info"),
            ) from None

    def _unreachable(self, reason: str) -> MusterError:
        return MusterError(
            f"cannot reach the API server {self.server}",
            why=harmless(reason.strip()),
            fix=f"{self.kubectl('cluster-info')}  # the same connection; is a VPN needed?",
        )

    def error(
        self,
        refused: Refused,
        verb: str,
        resource: Resource,
        name: str = "",
        needed: Sequence[str] = (),
    ) -> MusterError:
        """Return the error that explains a refusal; ``needed`` are the permissions if not only ``verb``."""
        wanted = f"{verb} {resource.named(name) if name else resource.plural}"
        why = refused.message
        if len(why) > _LONGEST_REASON:
            why = f"{why[: _LONGEST_REASON // 2]} … {why[-_LONGEST_REASON // 2 :]}"
        if refused.status == 401:
            return Impossible(
                f"the cluster does not accept your credentials: {wanted}",
                why=self._credentials or why,
                fix=f"log in again; to test it: {self.kubectl('auth whoami')}",
            )
        if refused.is_permission:
            return Impossible(
                f"no permission in namespace {self.namespace}: {wanted}",
                why=why,
                fix=f"ask for a Role with this rule: {_rule(resource, needed or [verb], why)}",
            )
        if refused.is_unknown_type:
            return Impossible(
                f"the cluster has no {resource.kind} ({resource.group}/{resource.version})",
                why="the controller that provides it is not installed, or is another version",
                fix="use --kind job, which every cluster has, or ask its administrators to install it",
            )
        if refused.status == 404 and refused.details.get("kind") == "namespaces":
            return Impossible(
                f"the cluster has no namespace {self.namespace}",
                why=why,
                fix=f"--namespace NAME, or: kubectl create namespace {self.namespace}",
            )
        if refused.status == 409:
            return Impossible(
                f"another program has changed {resource.named(name)}",
                why=why,
                fix=f"{self.muster('stop', name, '--delete')}  # then apply again",
            )
        if refused.status == 422 and "immutable" in why:
            return Impossible(
                f"{resource.named(name)} exists with other settings",
                why="Kubernetes cannot change the pods of a job that exists",
                fix=f"{self.muster('stop', name, '--delete')}  # then apply again, or apply with another --name",
            )
        if refused.status == 429 or refused.status >= 500:
            return NotNow(
                f"the API server {self.server} cannot answer now: {wanted}",
                why=why,
                fix="run the same command again in a minute",
            )
        return Impossible(
            f"the cluster refuses to {wanted}",
            why=why,
            fix=self.kubectl("describe resourcequota") if "quota" in why else "",
        )


def _rule(resource: Resource, verbs: Sequence[str], why: str) -> str:
    plural = f"{resource.plural}/log" if f'"{resource.plural}/log"' in why else resource.plural
    group = f'"{resource.group}"'
    listed = ", ".join(f'"{verb}"' for verb in verbs)
    return f'{{apiGroups: [{group}], resources: ["{plural}"], verbs: [{listed}]}}'


@contextlib.contextmanager
def notices(text: str, say: Callable[[str], None]) -> Iterator[None]:
    """Print a message every few seconds until the block is done."""
    done = threading.Event()
    began = time.monotonic()

    def remind() -> None:
        while not done.wait(_SAY_EVERY_S):
            say(f"muster: {text}, {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def connect_cluster(
    context: str | None, namespace: str | None, say: Callable[[str], None]
) -> Cluster:
    """Return the cluster of a context, of kubectl's current context, or of the pod that this process is in."""
    try:
        from kubernetes import config
    except ImportError:
        raise Impossible(
            "the package kubernetes is not installed",
            why="Muster uses it to send requests to a cluster",
            fix="pip install 'torchmuster[kubernetes]'  # or: muster kubernetes render … | kubectl apply -f -",
        ) from None

    from kubernetes.client import ApiClient, Configuration

    configuration = Configuration()
    # Report at once that a server does not answer.
    configuration.retries = False
    file = os.environ.get("KUBECONFIG") or "~/.kube/config"
    exists = any(Path(one).expanduser().is_file() for one in file.split(os.pathsep) if one)
    with _logged() as logged, notices("waiting for the credentials of the cluster", say):
        try:
            if exists:
                contexts, current = config.list_kube_config_contexts(file)
                chosen = _context_named(context, contexts) if context else current
                config.load_kube_config(
                    file, context=chosen["name"], client_configuration=configuration
                )
                usual = chosen["context"].get("namespace")
            elif context or "KUBERNETES_SERVICE_HOST" not in os.environ:
                reason = "" if context else ", and this process is not in a pod"
                raise config.ConfigException(f"there is no file {file}{reason}")
            else:
                config.load_incluster_config(client_configuration=configuration)
                usual = _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        except Impossible:
            raise
        except Exception as error:  # the package raises any type for a malformed file
            raise Impossible(
                "no Kubernetes cluster is configured",
                why=harmless(str(error)),
                fix="kubectl config get-contexts  # then --context NAME; KUBECONFIG=FILE names another file",
            ) from None
    given = (("--context", context), ("--namespace", namespace))
    return Cluster(
        ApiClient(configuration),
        namespace=namespace or usual or "default",
        context=context,
        flags="".join(f" {flag} {value}" for flag, value in given if value),
        credentials=harmless("; ".join(logged)),
        say=say,
    )


def _context_named(name: str, contexts: Sequence[Document]) -> Document:
    names = [str(one["name"]) for one in contexts]
    if name in names:
        return contexts[names.index(name)]
    raise Impossible(
        f"there is no context {name!r} in the kubeconfig file",
        why=f"its contexts are: {', '.join(names)}",
        fix=f"--context {nearest(name, names)}" if names else "kubectl config get-contexts",
    )


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the name that is most like another."""
    return (difflib.get_close_matches(name, names, 1, 0.0) or [names[0]])[0]


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what the package logs: it logs why credentials cannot be read, and continues without them."""
    messages: list[str] = []

    class _Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = _Collect()
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)
