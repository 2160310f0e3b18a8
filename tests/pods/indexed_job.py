"""A stand-in for the Job controller: one pod for each index; a pod that fails is replaced.

There is no Kubernetes in it: no API server, no scheduler, no back-off, one machine.
"""

import time
from collections.abc import Callable
from pathlib import Path

from ruamel.yaml import YAML

from patience import GIVE_UP_S
from pods.images import Image
from pods.pod import Pod
from pods.podman import Podman


class IndexedJob:
    """The Job of a manifest. ``condition`` is None while it runs, then ``Complete`` or ``Failed``.

    Only ``await_true`` and ``wait`` act on pods that ended.
    """

    def __init__(self, podman: Podman, lab: str, image: Image, manifest: str, folder: Path) -> None:
        service, job = YAML(typ="safe").load_all(manifest)
        self.name, self.spec = job["metadata"]["name"], job["spec"]
        assert service["metadata"]["name"] == self.spec["template"]["spec"]["subdomain"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": self.name}
        self.podman, self.lab, self.image, self.folder = podman, lab, image, folder
        self.runs = folder / "runs"
        self.condition: str | None = None
        self.pods: dict[int, Pod] = {}  # of each index, the current one
        self.ended: list[Pod] = []
        for index in range(self.spec["completions"]):
            self._create(index)

    def await_true(self, what: str, is_true: Callable[[], bool]) -> None:
        """Wait until something is true; it must come before the end of the Job."""
        until = time.monotonic() + GIVE_UP_S
        while not is_true():
            assert self.condition is None, f"{self.condition} before {what}\n{self.logs()}"
            assert time.monotonic() < until, f"not so: {what}\n{self.logs()}"
            self._control()
            time.sleep(0.2)

    def wait(self) -> str:
        """Wait for the end of the Job; return the condition."""
        until = time.monotonic() + GIVE_UP_S
        while self.condition is None:
            assert time.monotonic() < until, self.logs()
            self._control()
            time.sleep(0.2)
        for pod in self.pods.values():
            pod.stop()
        return self.condition

    def logs(self) -> str:
        """Return the output of all pods that there were."""
        pods = [*self.ended, *self.pods.values()]
        return "\n".join(f"--- {pod.name} ---\n{pod.log()}" for pod in pods)

    def _control(self) -> None:
        """Act on the pods that ended: what ``podFailurePolicy`` and ``successPolicy`` of the manifest mean."""
        final_codes = self.spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
        for index, pod in list(self.pods.items()):
            code = pod.exit_code()
            if code == 0 and index == 0:
                self.condition = "Complete"
            elif code in final_codes:
                self.condition = "Failed"
            elif code:
                self.ended.append(pod)
                self._create(index)

    def _create(self, index: int) -> None:
        number = len(self.ended)
        self.pods[index] = Pod(
            podman=self.podman,
            lab=self.lab,
            image=self.image,
            folder=self.folder,
            runs=self.runs,
            name=f"{self.lab}-{index}-{number}",
            host_name=f"{self.name}-{index}",
            template=self.spec["template"],
            index=str(index),
        )
        self.pods[index].start()
