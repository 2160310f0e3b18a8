"""One pod of a Job in podman: the values of its variables, its volumes as folders of this host, and its network name."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

from pods.images import USER_ID, Image
from pods.podman import LABEL, Podman

SECRET = "0123456789abcdef0123456789abcdef"
_FIELDS = {
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "index",
    "metadata.labels['batch.kubernetes.io/controller-uid']": "job_uid",
}
# Podman's name server loses queries while it reads its names again.
_DNS = {"options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "3"}]}


@dataclass(kw_only=True)
class Pod:
    """A pod, by its template in the manifest; ``host_name`` is that of the Job controller, ``NAME-INDEX``."""

    podman: Podman
    lab: str
    image: Image
    folder: Path
    runs: Path
    name: str
    host_name: str
    template: dict[str, Any]
    index: str
    job_uid: str = "uid-1"

    @property
    def container(self) -> str:
        """The name that podman gives the container."""
        return f"{self.name}-node"

    def start(self) -> None:
        """Create the pod and start its container."""
        spec = dict(self.template["spec"])
        container = dict(spec["containers"][0])
        volumes = {str(path): path for path in self.image.mounts}
        mounts = [
            {"name": str(path), "mountPath": str(path), "readOnly": True}
            for path in self.image.mounts
        ]
        for volume in spec["volumes"]:
            folder = self.folder / self.name / volume["name"]
            if volume["name"] == "runs":
                folder = self.runs
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, USER_ID, USER_ID)
            volumes[volume["name"]] = folder
        container["env"] = [{"name": v["name"], "value": self._value(v)} for v in container["env"]]
        container["args"] = [argument.replace("$$", "$") for argument in container["args"]]
        container["securityContext"] |= {"runAsUser": USER_ID, "runAsGroup": USER_ID}
        container["volumeMounts"] = container["volumeMounts"] + mounts
        spec["containers"] = [container]
        spec["volumes"] = [
            {"name": name, "hostPath": {"path": str(path)}} for name, path in volumes.items()
        ]
        spec |= {"hostname": self.host_name, "dnsConfig": _DNS}
        metadata = {"name": self.name, "labels": {LABEL: self.lab}}
        file = self.folder / f"{self.name}.yaml"
        with file.open("w") as stream:
            YAML(typ="safe").dump(
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, stream
            )
        alias = f"{self.host_name}.{spec['subdomain']}"
        self.podman("kube", "play", "--network", f"{self.lab}:alias={alias}", file)
        self._leave_cpu_group()

    def exit_code(self) -> int | None:
        """Return the exit code of the container; None while it runs."""
        state = "{{.State.Running}} {{.State.ExitCode}}"
        running, code = self.podman("inspect", "--format", state, self.container).split()
        if running == "true":
            return None
        return int(code)

    def pids(self) -> list[int]:
        """Return the processes of the container, as pids of this host."""
        pid = int(self.podman("inspect", "--format", "{{.State.Pid}}", self.container))
        if pid == 0:
            return []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(pid).children(recursive=True)
            return [pid, *(child.pid for child in children)]
        return []

    def stop(self) -> None:
        """Send SIGTERM, as when a node is drained or the Job ends, and wait for the end."""
        self.podman(
            "stop", "-t", self.template["spec"]["terminationGracePeriodSeconds"], self.container
        )

    def log(self) -> str:
        """Return the output of the container."""
        return self.podman("logs", self.container)

    def _value(self, variable: dict[str, Any]) -> str:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            return SECRET
        if "fieldRef" in source:
            field = _FIELDS[source["fieldRef"]["fieldPath"]]
            return str(getattr(self, field))
        return str(variable["value"])

    def _leave_cpu_group(self) -> None:
        """Let the container compete as an ordinary process: podman's group has the CPU share of one process (cgroup v1)."""
        group = Path("/sys/fs/cgroup/cpu/cgroup.procs")
        if group.exists():
            for pid in self.pids():
                with suppress(OSError):
                    group.write_text(str(pid))
