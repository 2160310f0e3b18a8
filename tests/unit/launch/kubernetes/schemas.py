"""The published schemas of Kubernetes, JobSet and Kubeflow Trainer."""

from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
from kubeflow_trainer_api import models  # type: ignore[import-untyped]

from unit.launch.kubernetes.unknown_keys import unknown_keys

# What a cluster may run: the oldest that is still served somewhere, and the newest we know.
VERSIONS = ["1.30", kubernetes_validate.latest_version()]


def validate(document: dict[str, Any]) -> None:
    """Put a document through both validators; raise on whatever either does not accept."""
    kinds: dict[str, Any] = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    if document["kind"] not in kinds:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        return
    model = kinds[document["kind"]]
    model.from_dict(document)
    unknown = unknown_keys(document, model)
    if unknown:
        raise ValueError(f"unknown keys: {unknown}")
    if document["kind"] == "JobSet":
        for one in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            validate({**job, "spec": one["template"]["spec"]})
