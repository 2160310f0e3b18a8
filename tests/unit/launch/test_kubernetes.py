"""``muster kubernetes``: the YAML as text, what kubectl reads in it, and what is refused."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from syrupy.assertion import SnapshotAssertion

from text_snapshots import TextFile
from torchmuster.cli import main
from torchmuster.errors import Impossible
from torchmuster.launch.schedulers.kubernetes import PodsRequest, render_job
from torchmuster.launch.schedulers.node_group import group_here


class YamlFile(TextFile):
    file_extension = "yaml"


def documents(text: str) -> list[dict[str, Any]]:
    reader = YAML(typ="safe", pure=True)
    reader.version = "1.1"  # as kubectl reads it
    return list(reader.load_all(text))


def pods_request(**changes: Any) -> PodsRequest:
    settings = {
        "name": "train",
        "image": "team/train:1",
        "command": ("train.py",),
    }
    return PodsRequest(**{**settings, **changes})


def job(request: PodsRequest) -> dict[str, Any]:
    service, job = documents(render_job(request))
    assert service["kind"] == "Service"
    return dict(job)


def container(request: PodsRequest) -> dict[str, Any]:
    return dict(job(request)["spec"]["template"]["spec"]["containers"][0])


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.main(["kubernetes", "--image", "team/train:1", *arguments]) == 0
    return capsys.readouterr().out


def test_what_is_printed(capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion) -> None:
    text = printed(capsys, "--nodes", "4", "--gpus-per-node", "8", "train.py", "--lr", "1e-4")
    assert text == snapshot.use_extension(YamlFile)


TRAPS = [
    "yes",
    "No",
    "~",
    "",
    "12:30:45",
    "1e3",
    "0x1f",
    ".5",
    "- a",
    '"',
    "\\",
    "{x}",
    "$(HOME)",
    "a\nb",
]


@given(st.one_of(st.text(st.characters(blacklist_categories=["Cs"])), st.sampled_from(TRAPS)))
def test_what_was_written_is_what_kubectl_reads(text: str) -> None:
    command = container(pods_request(command=("train.py", "--note", text)))["args"]
    assert command[-1].replace("$$", "$") == text
    assert re.sub(r"\$\$", "", command[-1]).count("$") == 0  # Kubernetes expands nothing in it


@pytest.mark.parametrize("name", ["train", "yes", "null"])
def test_a_name_is_a_text(name: str) -> None:
    assert job(pods_request(name=name))["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["run", "--device=cpu", "--ranks=1", "train.py"]),
        ({"gpus_per_node": 8}, ["run", "--max-restarts=3", "--set=launch.grace=30s"]),
        (
            {"subcommand": "train", "command": ("--config", "a.yaml")},
            ["train", "--config", "a.yaml"],
        ),
    ],
)
def test_the_arguments_of_muster(changes: dict[str, Any], expected: list[str]) -> None:
    arguments = container(pods_request(**changes))["args"]
    assert [argument for argument in arguments if argument in expected] == expected


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_pods_find_their_group(nodes: int) -> None:
    values = {}
    for variable in container(pods_request(nodes=nodes))["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            values[variable["name"]] = "0"
        elif "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "train-join", "key": "secret"}
            values[variable["name"]] = "0123456789abcdef"
        else:
            values[variable["name"]] = variable["value"]
    group = group_here(values)
    assert group is not None
    assert (group.nodes, group.run_id) == (nodes, "train")
    assert group.launcher == ("train-0.train" if nodes > 1 else "")


def test_a_pod_has_time_to_save() -> None:
    pod = job(pods_request())["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 45


def test_pods_have_few_rights() -> None:
    pod = job(pods_request())["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Train_1"},
        {"name": "a" * 62, "nodes": 10},
        {"name": "a" * 61, "nodes": 11},
        {"command": ("train.py", "--token", "hf_" + "a" * 30)},
    ],
)
def test_what_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Impossible):
        render_job(pods_request(**changes))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["code/My_Train.py"], "my-train"),
        (["-m", "package.train"], "train"),
        (["--name", "other", "train.py"], "other"),
        (["--", "muster", "train", "--config", "config.yaml"], "train"),
    ],
)
def test_the_name_of_the_job(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, job = documents(printed(capsys, *command))
    assert job["metadata"]["name"] == name
