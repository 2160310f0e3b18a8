"""``PodLab``: a cluster of one machine that runs the product's manifests as real pods."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from ruamel.yaml import YAML

from pods.controllers import Job, JobSet, jobset_of
from pods.images import Image, mounted_image
from pods.kubelet import Document, Node, Refused
from pods.podman import LABEL, Podman, lab_name, remove_abandoned, remove_lab

_COMMON = {"apiVersion", "kind", "metadata", "spec"}


class PodLab:
    """Pods on a network of their own, with claims and secrets; everything is removed at the end.

    ``files`` are the user's files in the image. Without ``image``, pods mount this host's Python.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, str], *, image: Image | None = None
    ) -> None:
        self.name = lab_name()
        self.folder = folder
        self._podman = Podman(folder)
        self._files = files
        self._image = image
        self._closing = ExitStack()
        self._node: Node | None = None

    def __enter__(self) -> Self:
        remove_abandoned(self._podman)
        self._closing.callback(remove_lab, self._podman, self.name)
        try:
            image = self._image or mounted_image(self._podman, self.name, self._files)
            self._podman("network", "create", "--label", f"{LABEL}={self.name}", self.name)
        except BaseException:
            self._closing.close()
            raise
        self._node = Node(
            lab=self.name,
            podman=self._podman,
            folder=self.folder,
            network=self.name,
            image=image,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.close()

    @property
    def node(self) -> Node:
        """What the pods use."""
        assert self._node is not None
        return self._node

    @property
    def image(self) -> str:
        """The image's name, for the manifest."""
        return self.node.image.name

    def claim(self, name: str) -> Path:
        """Create a claim, and return its folder on this host."""
        folder = self.folder / "claims" / name
        folder.mkdir(parents=True)
        self.node.claims[name] = folder
        return folder

    def secret(self, name: str, values: Mapping[str, str]) -> None:
        """Create a Secret."""
        self.node.secrets[name] = dict(values)

    def apply(self, text: str) -> Job | JobSet:
        """Create the objects of a manifest, and start its Job, JobSet or TrainJob."""
        documents: Sequence[Document] = list(YAML(typ="safe").load_all(text))
        services = {
            document["metadata"]["name"]: document
            for document in documents
            if document["kind"] == "Service"
        }
        started: Job | JobSet | None = None
        for document in documents:
            if unknown := document.keys() - _COMMON:
                raise Refused(f"the lab does not know {sorted(unknown)} of a {document['kind']}")
            kind = document["kind"]
            if kind == "Job":
                started = self._job(document, services)
            elif kind == "JobSet":
                started = JobSet(self.node, document)
            elif kind == "TrainJob":
                started = JobSet(self.node, jobset_of(document))
            elif kind != "Service":
                raise Refused(f"the lab does not know the kind {kind}")
        if started is None:
            raise Refused("no Job, JobSet or TrainJob in the manifest")
        self._closing.callback(started.close)
        started.start()
        return started

    def _job(self, document: Document, services: Mapping[str, Document]) -> Job:
        """A pod has a name in DNS if the Service named as its subdomain selects it."""
        job = Job(self.node, document)
        subdomain = document["spec"]["template"]["spec"].get("subdomain")
        if subdomain is not None:
            selector = services[subdomain]["spec"]["selector"]
            labels = document["spec"]["template"].get("metadata", {}).get("labels", {})
            ours = {**labels, "batch.kubernetes.io/job-name": job.name, "job-name": job.name}
            if not selector.items() <= ours.items():
                raise Refused(f"the Service {subdomain} selects no pod of {job.name}")
            if services[subdomain]["spec"].get("clusterIP") != "None":
                raise Refused("names of pods need a headless Service")
        return job
