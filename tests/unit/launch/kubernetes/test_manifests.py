"""Manifests: frozen as text, accepted by two validators, refused where they could not work."""

import copy
from dataclasses import replace
from typing import Any, get_args

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api import models  # type: ignore[import-untyped]
from pydantic import ValidationError
from syrupy.assertion import SnapshotAssertion

from text_snapshots import TextFile
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import Host, JobSpec
from torchmuster.launch.schedulers.kubernetes.manifests import (
    first_address,
    render_manifests,
    to_yaml,
)
from torchmuster.launch.schedulers.kubernetes.request import GpuResource, Kind, KubernetesRequest
from torchmuster.units import GiB
from unit.launch.kubernetes.schemas import validate
from unit.launch.kubernetes.unknown_keys import unknown_keys


class YamlFile(TextFile):
    file_extension = "yaml"


KINDS: tuple[Kind, ...] = get_args(Kind)
IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"

SPEC = JobSpec(
    name="train",
    command=("train.py", "--lr", "1e-3", "--note", "costs $5 or $(HOME)"),
    folder="/work",
    environment={"NCCL_DEBUG": "WARN", "DEBUG": "no"},
)
REQUEST = KubernetesRequest(
    name="train", image=IMAGE, nodes=4, gpus_per_node=8, cpu=96, memory_bytes=768 * GiB
)
SMALL = KubernetesRequest(name="smoke", image=IMAGE, nodes=2)


def container(spec: JobSpec, request: KubernetesRequest, kind: Kind) -> dict[str, Any]:
    document = render_manifests(spec, request, kind)[-1]
    if kind == "trainjob":
        return dict(document["spec"]["trainer"])
    return dict(pod(document)["containers"][0])


def pod(document: dict[str, Any]) -> dict[str, Any]:
    job = document["spec"]
    if document["kind"] == "JobSet":
        job = job["replicatedJobs"][0]["template"]["spec"]
    return dict(job["template"]["spec"])


# ---- the text


@pytest.mark.parametrize("kind", KINDS)
def test_as_text(snapshot: SnapshotAssertion, kind: Kind) -> None:
    assert to_yaml(render_manifests(SPEC, REQUEST, kind)) == snapshot.use_extension(YamlFile)


def test_as_text_with_everything(snapshot: SnapshotAssertion) -> None:
    spec = replace(
        SPEC,
        command=("package.train", "--steps", "10"),
        module=True,
        ranks=2,
        port=29555,
        max_restarts=3,
        environment={"HF_TOKEN": "hf_" + "a" * 20, "OMP_NUM_THREADS": "1"},
    )
    request = replace(
        REQUEST,
        gpu_resource="amd.com/gpu",
        namespace="research",
        secret="tokens",
        user=2000,
        shm_bytes=16 * GiB,
    )
    assert to_yaml(render_manifests(spec, request, "jobset")) == snapshot.use_extension(YamlFile)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_does_not_grow_with_the_pods(kind: Kind) -> None:
    few, many = (
        to_yaml(render_manifests(SPEC, replace(REQUEST, nodes=n), kind)) for n in (4, 4_000)
    )
    assert few.count("\n") == many.count("\n")
    assert len(many) - len(few) <= 4 * len("000")  # the number itself, four times at most


TEXTS = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=30)
TRAPS = ["yes", "No", "on", "~", "null", "", "12:30:45", "1e3", "0x1f", "1_000", ".5", "=", "- a"]


@given(st.one_of(TEXTS, st.sampled_from(TRAPS)))
def test_what_was_written_is_what_kubectl_reads(text: str) -> None:
    # PyYAML reads YAML 1.1, as kubectl does.
    documents: list[dict[str, Any]] = [
        {"kind": "x", "args": [text], "env": {"name": text}, text: 1},
        {"second": True},
    ]
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


def test_lines_and_long_texts_survive() -> None:
    documents = [{"value": "first\n\tsecond " + "word " * 1000}]
    assert yaml.safe_load(to_yaml(documents)) == documents[0]


# ---- the validators


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("request_", [REQUEST, SMALL], ids=["gpus", "small"])
def test_both_validators_accept_what_is_rendered(kind: Kind, request_: KubernetesRequest) -> None:
    options = replace(request_, namespace="research", user=2000, secret="tokens")
    spec = replace(SPEC, environment={"HF_TOKEN": "x"})
    for one, other in ((SPEC, request_), (spec, options)):
        for document in yaml.safe_load_all(to_yaml(render_manifests(one, other, kind))):
            validate(document)


MISTAKES: dict[Kind, list[list[str | int]]] = {
    "job": [
        ["spec"],
        ["spec", "template", "spec"],
        ["spec", "template", "spec", "containers", 0],
        ["spec", "template", "spec", "volumes", 1, "emptyDir"],
    ],
    "jobset": [
        ["spec"],
        ["spec", "network"],
        ["spec", "replicatedJobs", 0],
        ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0],
    ],
    "trainjob": [
        [],
        ["spec", "trainer"],
        ["spec", "trainer", "env", 0],
        ["spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec"],
    ],
}


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, one) for kind in KINDS for one in MISTAKES[kind]]
)
def test_an_unknown_key_is_refused_wherever_it_is(kind: Kind, path: list[str | int]) -> None:
    document = copy.deepcopy(render_manifests(SPEC, REQUEST, kind)[-1])
    place: Any = document
    for step in path:
        place = place[step]
    place["restartPolcy"] = "Never"
    with pytest.raises((ValueError, kubernetes_validate.ValidationError), match="restartPolcy"):
        validate(document)


def test_the_models_alone_would_accept_it() -> None:
    document = render_manifests(SPEC, REQUEST, "trainjob")[0]
    document["spec"]["trainer"]["numNode"] = 3
    models.TrainerV1alpha1TrainJob.from_dict(document)
    found = unknown_keys(document, models.TrainerV1alpha1TrainJob)
    assert found == ["spec.trainer.numNode"]


def test_a_wrong_type_is_refused() -> None:
    document = render_manifests(SPEC, REQUEST, "trainjob")[0]
    document["spec"]["trainer"]["numNodes"] = "four"
    with pytest.raises(ValidationError, match="numNodes"):
        validate(document)


# ---- what the pods get


def test_the_service_gives_names_to_the_jobs_pods_before_they_are_ready() -> None:
    service, job = render_manifests(SPEC, REQUEST, "job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod(job)["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize(
    ("kind", "address"), [("job", "train-0.train"), ("jobset", "train-node-0-0.train")]
)
def test_all_pods_are_sent_to_the_first(kind: Kind, address: str) -> None:
    assert first_address(REQUEST, kind) == address
    pods = container(SPEC, REQUEST, kind)
    assert pods["args"][0] == "run"
    assert pods["args"][pods["args"].index("--") + 1] == "train.py"
    variables = {one["name"]: one for one in pods["env"]}
    assert variables["TORCHMUSTER_NNODES"]["value"] == "4"
    assert variables["TORCHMUSTER_LAUNCHER"]["value"] == f"{address}:29399"
    # The variable JOB_COMPLETION_INDEX is defined after these, so they cannot refer to it.
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    rank = variables["TORCHMUSTER_NODE_RANK"]["valueFrom"]
    assert rank == {"fieldRef": {"fieldPath": index}}
    secret = variables["TORCHMUSTER_JOIN_SECRET"]["valueFrom"]
    assert secret == {"secretKeyRef": {"name": "train-join", "key": "secret"}}


def test_a_training_is_started_as_the_user_typed_it() -> None:
    spec = replace(SPEC, command=("--config", "config.yaml"), max_restarts=3)
    request = replace(SMALL, subcommand="train", volume="claim")
    pods = container(spec, request, "job")
    assert pods["args"] == [
        "train",
        "--runs=/runs",
        "--join-timeout=1800s",
        "--max-restarts=3",
        "--grace=30s",
        "--device=cpu",
        "--ranks=1",
        "--config",
        "config.yaml",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dollar_of_the_users_stays_a_dollar(kind: Kind) -> None:
    assert container(SPEC, REQUEST, kind)["args"][-1] == "costs $$5 or $$(HOME)"


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    job = document["spec"]
    if document["kind"] == "JobSet":
        job = job["replicatedJobs"][0]["template"]["spec"]
    return dict(job)


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_pods_are_replaced_one_by_one_unless_the_run_is_over(kind: Kind) -> None:
    document = render_manifests(SPEC, REQUEST, kind)[-1]
    job = job_of(document)
    assert pod(document)["restartPolicy"] == "Never"
    evicted, over = job["podFailurePolicy"]["rules"]
    assert (evicted["action"], over["action"]) == ("Ignore", "FailJob")
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert over["onExitCodes"]["operator"] == "In"
    codes = set(over["onExitCodes"]["values"])
    assert codes >= {ExitCode.FAILED, ExitCode.IMPOSSIBLE, ExitCode.NOT_NOW}
    # 255: containerd's code after a crash of the node.
    assert codes.isdisjoint({0, ExitCode.SAVED, ExitCode.KILLED, ExitCode.TERMINATED, 255})
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    if kind == "jobset":
        assert document["spec"]["failurePolicy"] == {"maxRestarts": 0}


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_pods_may_do_little(kind: Kind) -> None:
    inside = pod(render_manifests(SPEC, REQUEST, kind)[-1])
    assert inside["automountServiceAccountToken"] is False
    assert inside["securityContext"]["runAsNonRoot"] is True
    for one in inside["containers"]:
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    own = pod(render_manifests(SPEC, replace(REQUEST, user=None), kind)[-1])
    assert "runAsUser" not in own["securityContext"]


def test_every_pod_says_which_run_it_belongs_to() -> None:
    for document in render_manifests(SPEC, REQUEST, "job"):
        assert document["metadata"]["labels"]["torchmuster/run"] == "train"
    assert job_of(document)["template"]["metadata"]["labels"]["torchmuster/run"] == "train"


def test_an_exporter_is_served_with_a_token_and_tls() -> None:
    request = replace(REQUEST, metrics_secret="metrics", volume="claim")
    document = render_manifests(SPEC, request, "jobset")[-1]
    validate(document)
    (exporter,) = pod(document)["initContainers"]
    assert exporter["restartPolicy"] == "Always"
    assert exporter["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    flags = {word.partition("=")[0] for word in exporter["args"]}
    assert flags >= {"--token-file", "--certificate"}
    annotations = job_of(document)["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scheme"] == "https"


@pytest.mark.parametrize("resource", get_args(GpuResource))
def test_each_makers_gpus_have_their_name(resource: GpuResource) -> None:
    resources = container(SPEC, replace(REQUEST, gpu_resource=resource), "job")["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"] == {"cpu": "96", "memory": "768Gi", resource: "8"}


def test_threads_are_shared_among_the_ranks_unless_set() -> None:
    def threads(spec: JobSpec, request: KubernetesRequest) -> list[str]:
        variables = container(spec, request, "job")["env"]
        return [one["value"] for one in variables if one["name"] == "OMP_NUM_THREADS"]

    assert threads(SPEC, REQUEST) == ["12"]
    assert threads(replace(SPEC, environment={"OMP_NUM_THREADS": "3"}), REQUEST) == ["3"]
    assert threads(SPEC, SMALL) == []


def test_muster_inside_a_pod_knows_how_long_the_pod_may_take_to_end() -> None:
    (variable,) = [
        one
        for one in container(SPEC, REQUEST, "job")["env"]
        if one["name"] == "TORCHMUSTER_TERMINATION_GRACE_S"
    ]
    limit_s = pod(render_manifests(SPEC, REQUEST, "job")[-1])["terminationGracePeriodSeconds"]
    assert variable["value"] == str(limit_s)


@pytest.mark.parametrize(
    ("memory", "shared", "expected"),
    [
        (None, None, "8Gi"),
        (768 * GiB, None, "384Gi"),
        (None, 3 * 2**20, "3Mi"),
        (None, 3 * 2**20 + 1, "3145729"),
    ],
)
def test_shared_memory_has_a_limit(memory: int | None, shared: int | None, expected: str) -> None:
    request = replace(REQUEST, memory_bytes=memory, shm_bytes=shared)
    volume = pod(render_manifests(SPEC, request, "job")[1])["volumes"][-1]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": expected}


def test_ranks_are_the_jobs_or_one_for_each_gpu() -> None:
    trainer = container(replace(SPEC, ranks=4), REQUEST, "trainjob")
    assert trainer["numProcPerNode"] == 4
    assert container(SPEC, REQUEST, "trainjob")["numProcPerNode"] == 8
    assert container(SPEC, SMALL, "trainjob")["numProcPerNode"] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "variable", [{"WANDB_API_KEY": "x"}, {"HUB": "hf_" + "a" * 20}], ids=["by name", "by shape"]
)
def test_a_secret_never_stands_in_a_manifest(kind: Kind, variable: dict[str, str]) -> None:
    (name,) = variable
    spec = replace(SPEC, environment=variable)
    with pytest.raises(Impossible) as caught:
        render_manifests(spec, REQUEST, kind)
    assert caught.value.what.startswith(f"{name} is a secret")
    assert caught.value.fix.startswith("kubectl create secret generic train-secrets ")
    assert f" --from-literal={name}=" in caught.value.fix
    env = container(spec, replace(REQUEST, secret="train-secrets"), kind)["env"]
    reference = {"secretKeyRef": {"name": "train-secrets", "key": name}}
    assert env[-1] == {"name": name, "valueFrom": reference}


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("Train_1", "--name train-1"),
        ("1st", "--name job-1st"),
        ("a-", "--name a"),
        ("", "--name job"),
        ("a.b", "--name a-b"),
    ],
)
def test_a_name_that_dns_does_not_allow_comes_with_one_that_it_does(
    name: str, fix: str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as caught:
        render_manifests(SPEC, replace(REQUEST, name=name), "job")
    assert caught.value.fix == fix
    assert str(caught.value) == snapshot
    render_manifests(SPEC, replace(REQUEST, name=fix.removeprefix("--name ")), "job")


@pytest.mark.parametrize(("kind", "longest"), [("job", 61), ("jobset", 48), ("trainjob", 48)])
def test_the_length_of_a_name_is_that_of_the_longest_pod(kind: Kind, longest: int) -> None:
    render_manifests(SPEC, replace(REQUEST, name="n" * longest), kind)
    with pytest.raises(Impossible, match="exceeds the length limit by 1") as caught:
        render_manifests(SPEC, replace(REQUEST, name="n" * (longest + 1)), kind)
    assert caught.value.fix == f"--name {'n' * longest}"
    with pytest.raises(
        Impossible, match="exceeds the length limit by 1"
    ):  # pod 10 has one digit more
        render_manifests(SPEC, replace(REQUEST, name="n" * longest, nodes=11), kind)


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], Kind, str]] = [
    ({}, {"image": ""}, "job", "the image is missing"),
    ({}, {"image": "my image"}, "job", "'my image' is not a valid image"),
    ({}, {"nodes": 0}, "job", "invalid value: 0 nodes"),
    ({}, {"gpus_per_node": -1}, "job", "invalid value: -1 GPUs per node"),
    ({}, {"cpu": 0}, "job", "invalid value: 0 CPUs"),
    ({}, {"shm_bytes": 0}, "job", "invalid value: 0 bytes of shared memory"),
    ({}, {"memory_bytes": 64}, "job", "--memory 64 means 64 bytes"),
    ({}, {"shm_bytes": 8}, "job", "--shm 8 means 8 bytes"),
    ({}, {"namespace": "My_Space"}, "job", "'My_Space' is not a valid name for a namespace"),
    ({"ranks": 0}, {}, "job", "invalid value: 0 ranks per node"),
    ({"ranks": 9}, {}, "job", "9 ranks per pod requested, but only 8 GPUs per pod"),
    ({"port": 80}, {}, "job", "invalid port: 80"),
    ({}, {"metrics_secret": "m"}, "trainjob", "a trainjob cannot have an exporter"),
    (
        {},
        {"volume": "My_Claim"},
        "job",
        "'My_Claim' is not a valid name for a PersistentVolumeClaim",
    ),
    ({}, {"user": 0}, "job", "invalid value: 0 as the user's number"),
    (
        {"environment": {"TORCHMUSTER_NODE_RANK": "2"}},
        {},
        "job",
        "TORCHMUSTER_NODE_RANK cannot be set for a job",
    ),
    ({"device": "gpu"}, {"gpus_per_node": 0}, "job", "--device gpu is set, but 0 GPUs per pod"),
    ({"device": "cpu"}, {}, "job", "--device cpu and 8 GPUs per pod contradict"),
    ({"hosts": (Host(name="a"),)}, {}, "job", "hosts or GPU ids cannot be set for Kubernetes"),
    ({"environment": {"PET_NNODES": "2"}}, {}, "job", "PET_NNODES cannot be set for a job"),
    ({"environment": {"A-B": "2"}}, {}, "job", "'A-B' is not a valid variable name"),
    (
        {"command": ("t.py", "--hub-token", "x")},
        {},
        "job",
        "the script's arguments contain a secret",
    ),
    (
        {},
        {"memory_bytes": 4 * GiB, "shm_bytes": 8 * GiB},
        "job",
        "8.0 GiB of shared memory requested, but only 4.0 GiB in total",
    ),
]


@pytest.mark.parametrize(("spec", "request_", "kind", "what"), REFUSALS)
def test_what_no_cluster_would_run_is_refused_here(
    spec: dict[str, Any], request_: dict[str, Any], kind: Kind, what: str
) -> None:
    with pytest.raises(Impossible) as caught:
        render_manifests(replace(SPEC, **spec), replace(REQUEST, **request_), kind)
    assert caught.value.what.startswith(what)
    assert caught.value.fix or caught.value.why
