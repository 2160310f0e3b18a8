"""Run one pod with podman as the kubelet would: variables, volumes, security, restarts of the container, kills.

Podman 4.3 does not know all fields of a pod; README.md lists which ones are replaced or left out. A field that this module
does not know is an error, so that nothing that the product renders is ignored in silence.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

from hosts.killing import command_line, is_rank
from patience import GIVE_UP_S
from pods.images import Image
from pods.podman import LABEL, Podman, unmount

Document = dict[str, Any]

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_QUANTITY = re.compile(r"(\d+)(Ki|Mi|Gi|Ti|)")
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Fields of a pod that mean nothing without a cluster: they choose a node, or give access to the API.
_LEFT_OUT = {
    "affinity", "automountServiceAccountToken", "enableServiceLinks", "nodeSelector", "priorityClassName",
    "serviceAccountName", "subdomain", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints",
}  # fmt: skip
_KNOWN = {"containers", "hostname", "restartPolicy", "securityContext", "volumes"}
_PROBES = {"livenessProbe", "readinessProbe", "startupProbe"}
_CONTAINER = {
    "args", "command", "env", "image", "imagePullPolicy", "name", "ports", "resources", "securityContext",
    "volumeMounts", "workingDir",
}  # fmt: skip


class Refused(Exception):
    """The kubelet or the API server of a cluster would refuse this pod."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` as the kubelet does: an unknown name stays as it is, and ``$$`` is ``$``."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def variables_of(
    container: Document, metadata: Document, secrets: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return a container's variables; a value sees only those that stand before it."""
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        name, source = variable["name"], variable.get("valueFrom")
        if source is None:
            found[name] = expand(str(variable.get("value", "")), found)
        elif "secretKeyRef" in source:
            secret, key = source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]
            if key in secrets.get(secret, {}):
                found[name] = secrets[secret][key]
            elif not source["secretKeyRef"].get("optional"):
                raise Refused(f"CreateContainerConfigError: secret {secret} has no key {key}")
        elif "fieldRef" in source:
            found[name] = _field(source["fieldRef"]["fieldPath"], metadata)
        else:
            raise Refused(f"the lab does not know this source of {name}: {source}")
    return found


def _field(path: str, metadata: Document) -> str:
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(metadata.get(match[1], {}).get(match[2], ""))
    if match := re.fullmatch(r"metadata\.(name|namespace|uid)", path):
        return str(metadata[match[1]])
    raise Refused(f"the lab does not know the field {path}")


def bytes_of(quantity: str) -> int:
    """Return the bytes of a quantity such as ``8Gi``."""
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise Refused(f"the lab does not know the quantity {quantity}")
    return int(match[1]) * _UNITS[match[2]]


def check_user(context: Document, image_user: str) -> int:
    """Return the user of a container; refuse what the kubelet refuses under ``runAsNonRoot``."""
    user = context.get("runAsUser")
    if user is None:
        user = image_user.partition(":")[0] or "0"
        if not user.isdigit():
            if context.get("runAsNonRoot"):
                raise Refused(
                    "CreateContainerConfigError: container has runAsNonRoot and image has non-numeric "
                    f"user ({user}), cannot verify user is non-root"
                )
            return 0
    if int(user) == 0 and context.get("runAsNonRoot"):
        raise Refused("CreateContainerConfigError: container has runAsNonRoot, would run as root")
    return int(user)


@dataclass(kw_only=True)
class Node:
    """What all pods of a lab use: podman, the network, the image, claims and secrets."""

    lab: str
    podman: Podman
    folder: Path
    network: str
    image: Image
    claims: dict[str, Path] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)

    def image_user(self, image: str) -> str:
        """Return the user that is set in an image."""
        return self.podman("image", "inspect", "--format", "{{.Config.User}}", image).strip()


@dataclass(kw_only=True)
class Pod:
    """A pod that runs, or ran: its name, its node rank, its address and its container's process."""

    node: Node
    name: str
    index: int
    host: str
    document: Document
    address: str = ""
    pid: int = 0
    restarts: int = 0
    #: Whether the pod was taken away from outside, which Kubernetes reports as DisruptionTarget.
    disrupted: bool = False
    exit_code: int | None = None
    _removal: subprocess.Popen[bytes] | None = None
    _removing: bool = False

    @property
    def container(self) -> str:
        """The name that podman gives the only container."""
        return f"{self.name}-{self.document['spec']['containers'][0]['name']}"

    @property
    def grace_s(self) -> int:
        """The seconds from SIGTERM to SIGKILL."""
        return int(self.document["spec"].get("terminationGracePeriodSeconds", 30))

    @property
    def folder(self) -> Path:
        """The folder of the pod's temporary volumes on this host."""
        return self.node.folder / "pods" / self.name

    def create(self) -> None:
        """Create the pod and start its container."""
        document = self._for_podman()
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "pod.yaml"
        with file.open("w") as out:
            YAML(typ="safe").dump(document, out)
        subdomain = self.document["spec"].get("subdomain")
        alias = f"{self.host}.{subdomain}" if subdomain else self.host
        podman = self.node.podman
        podman("kube", "play", "--network", f"{self.node.network}:alias={alias}", file)
        self._read_process()
        infra = podman("pod", "inspect", "--format", "{{.InfraContainerID}}", self.name).strip()
        place = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        self.address = podman("inspect", "--format", place, infra).strip()

    def restart(self) -> None:
        """Start the container again in the same pod, as the kubelet does under ``OnFailure``."""
        self.save_log()
        self.restarts += 1
        self.exit_code = None
        self.node.podman("start", self.container)
        self._read_process()

    def wait(self) -> int | None:
        """Wait for the container's end; return its exit code, or None if the pod is gone."""
        text = self.node.podman("wait", self.container, may_fail=True).strip()
        self.exit_code = int(text) if text else None
        return self.exit_code

    def log(self) -> str:
        """Return the output of the container, also of a pod that is gone."""
        self.save_log()
        file = self.node.folder / "logs" / f"{self.name}.log"
        return file.read_text() if file.exists() else ""

    def save_log(self) -> None:
        """Keep the output so far; podman removes it together with the pod."""
        done = subprocess.run(
            ["podman", "logs", self.container],
            env=self.node.podman.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode == 0:
            folder = self.node.folder / "logs"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.name}.log").write_text(done.stdout)

    def processes(self) -> list[int]:
        """Return the processes in the container, as pids of this host."""
        space = _space_of(self.pid)
        return [pid for pid in psutil.pids() if _space_of(pid) == space] if space else []

    def kill(self) -> float:
        """Kill the container's first process, and so the container; return when."""
        os.kill(self.pid, signal.SIGKILL)
        return time.time()

    def kill_rank(self, rank: int) -> float:
        """Kill one rank; return when."""
        matches = is_rank(rank)
        until_s = time.monotonic() + GIVE_UP_S
        while not (pids := [pid for pid in self.processes() if matches(pid)]):
            if time.monotonic() > until_s:
                lines = "\n".join(map(command_line, self.processes()))
                raise AssertionError(f"no rank {rank} in {self.name}:\n{lines}")
            time.sleep(0.02)
        os.kill(pids[0], signal.SIGKILL)
        return time.time()

    def remove(self, *, silently: bool = False) -> float:
        """Take the whole pod away at once, as when its node is lost; return when.

        ``silently`` cuts the network first, so that no other pod receives the end of a connection.
        """
        self.disrupted = True
        at_s = time.time()
        if silently:
            words = ["nsenter", "-t", str(self.pid), "-n", "ip", "link", "set", "eth0", "down"]
            subprocess.run(words, check=True, capture_output=True)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.save_log()
        self._remove_pod()
        return at_s

    def evict(self) -> float:
        """Drain: SIGTERM, then SIGKILL after the grace period; return when. Does not wait."""
        self.disrupted = True
        self._removal = self.node.podman.start("stop", "-t", self.grace_s, self.container)
        return time.time()

    def terminate(self) -> None:
        """Stop the container as when its Job ends, and wait for that."""
        self.node.podman("stop", "-t", self.grace_s, self.container, may_fail=True)
        self.wait()

    def discard(self) -> None:
        """Remove what is left of a pod that is over; podman needs seconds, so this does not wait."""
        if not self._removing:
            self.save_log()
            self._remove_pod()

    def close(self) -> None:
        """Wait until podman has removed the pod, and remove its volumes."""
        if self._removal is not None:
            self._removal.wait(GIVE_UP_S)
        unmount(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_pod(self) -> None:
        if self._removal is not None:
            self._removal.wait(GIVE_UP_S)
        self._removing = True
        self._removal = self.node.podman.start("pod", "rm", "-f", "-t", "0", self.name)

    def _read_process(self) -> None:
        text = self.node.podman("inspect", "--format", "{{.State.Pid}}", self.container)
        self.pid = int(text)  # 0 if it is over already
        self._leave_cpu_group()

    def _leave_cpu_group(self) -> None:
        """Let the container's processes compete as ordinary ones.

        Podman puts all containers of the host into one group that gets as much CPU time as a single process outside of it, so that
        on a busy host pods hardly run. Only processes of this pod are moved, and only as far as CPU time goes.
        """
        group = Path("/sys/fs/cgroup/cpu/cgroup.procs")
        if group.exists():  # cgroup v1
            for pid in self.processes():
                with suppress(OSError):
                    group.write_text(str(pid))

    def _for_podman(self) -> Document:
        """Return the pod in the form that podman 4.3 understands."""
        metadata, spec = self.document["metadata"], self.document["spec"]
        if unknown := spec.keys() - _KNOWN - _LEFT_OUT:
            raise Refused(f"the lab does not know these fields of a pod: {sorted(unknown)}")
        (container,) = spec["containers"]
        if unknown := container.keys() - _CONTAINER - _PROBES:
            raise Refused(f"the lab does not know these fields of a container: {sorted(unknown)}")
        context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        user = check_user(context, self.node.image_user(container["image"]))
        group = int(context.get("fsGroup", user))
        variables = variables_of(container, metadata, self.node.secrets)
        mounts = [
            {"name": f"host-{number}", "mountPath": str(path), "readOnly": True}
            for number, path in enumerate(self.node.image.mounts)
        ]
        volumes = [
            {"name": f"host-{number}", "hostPath": {"path": str(path)}}
            for number, path in enumerate(self.node.image.mounts)
        ]
        volumes += [self._volume(volume, group) for volume in spec.get("volumes", [])]
        security = {key: value for key, value in context.items() if key not in _POD_SECURITY}
        ours = {key: container[key] for key in ("name", "image", "workingDir") if key in container}
        ours |= {
            key: [expand(text, variables) for text in container[key]]
            for key in ("command", "args")
            if key in container
        }
        ours["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        ours["securityContext"] = security | {"runAsUser": user, "runAsGroup": group}
        ours["volumeMounts"] = [*container.get("volumeMounts", []), *mounts]
        ours["imagePullPolicy"] = "Never"
        if resources := _without_gpus(container.get("resources", {})):
            ours["resources"] = resources
        labels = {**metadata["labels"], LABEL: self.node.lab}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "labels": labels},
            "spec": {
                "hostname": self.host,
                "restartPolicy": "Never",
                "dnsConfig": _QUICK_DNS,
                "containers": [ours],
                "volumes": volumes,
            },
        }

    def _volume(self, volume: Document, group: int) -> Document:
        name = volume["name"]
        if "persistentVolumeClaim" in volume:
            path = self.node.claims.get(volume["persistentVolumeClaim"]["claimName"])
            if path is None:
                raise Refused(f"Pending: no claim {volume['persistentVolumeClaim']['claimName']}")
        elif "emptyDir" in volume:
            path = self.folder / name
            path.mkdir(parents=True, exist_ok=True)
            settings = volume["emptyDir"]
            if settings.get("medium") == "Memory":
                options = (
                    f"size={bytes_of(settings['sizeLimit'])}" if "sizeLimit" in settings else ""
                )
                words = ["mount", "-t", "tmpfs", *(["-o", options] if options else [])]
                subprocess.run([*words, self.node.lab, str(path)], check=True, capture_output=True)
        else:
            raise Refused(f"the lab does not know this volume: {volume}")
        os.chown(path, 0, group)
        path.chmod(0o2777 if "emptyDir" in volume else 0o2775)
        return {"name": name, "hostPath": {"path": str(path)}}


# Podman's name server loses queries while it reads its names again, and the resolver waits 5 s for each of them.
_QUICK_DNS = {
    "options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "3"}],
}
# Of a pod's security context; podman does not know them, and the lab does what they say by itself.
_POD_SECURITY = {"fsGroup", "fsGroupChangePolicy", "runAsNonRoot", "runAsUser", "runAsGroup"}


def _without_gpus(resources: Document) -> Document:
    return {
        kind: {name: amount for name, amount in amounts.items() if name in ("cpu", "memory")}
        for kind, amounts in resources.items()
    }


def _space_of(pid: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""
