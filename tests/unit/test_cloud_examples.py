"""The example files for SkyPilot and dstack: their keys, and what their commands start on each node.

Both packages bring dozens of others, so they are not installed here. The keys below are those of SkyPilot 0.14.1 and dstack 0.22.5,
whose own parsers accepted the files.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from patience import GIVE_UP_S
from torchmuster.launch.schedulers.node_group import NodeGroup, group_here

EXAMPLES = Path(__file__).parents[2] / "examples"
SECRET = "x" * 32
# Key -> type; a dictionary has the keys of the next level.
SKYPILOT: dict[str, Any] = {
    "name": str,
    "num_nodes": int,
    "resources": {"accelerators": str},
    "workdir": str,
    "secrets": {"TORCHMUSTER_JOIN_SECRET": type(None)},
    "setup": str,
    "run": str,
}
DSTACK: dict[str, Any] = {
    "type": str,
    "name": str,
    "nodes": int,
    "python": str,
    "repos": list,
    "env": list,
    "commands": list,
    "resources": {"gpu": str, "shm_size": str},
}


def check_keys(document: dict[str, Any], keys: dict[str, Any], where: str = "") -> None:
    """Raise on an unknown key, and on a value of another type."""
    for name, value in document.items():
        assert name in keys, f"{where}{name} is not a key"
        if isinstance(keys[name], dict):
            check_keys(value, keys[name], f"{where}{name}.")
        else:
            assert isinstance(value, keys[name]), f"{where}{name}: {value!r}"


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLES / name).read_text()))


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder with ``muster``, which writes its arguments and variables to a file, and ``pip``."""
    (tmp_path / "muster").write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith('TORCHMUSTER_')}]))\n"
    )
    (tmp_path / "pip").write_text("#!/bin/sh\n")
    for name in ("muster", "pip"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


def started(stubs: Path, script: str, variables: dict[str, str]) -> tuple[list[str], NodeGroup]:
    """Run a script as the scheduler does on one node; return the arguments of muster, and the node's group."""
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**variables, "PATH": path, "TORCHMUSTER_JOIN_SECRET": SECRET},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=True,
    )
    words, environment = json.loads(done.stdout.splitlines()[-1])
    group = group_here(environment)
    assert group is not None
    return words, group


def test_skypilot_has_only_known_keys() -> None:
    document = read("skypilot.yaml")
    check_keys(document, SKYPILOT)
    with pytest.raises(AssertionError, match="nodes is not a key"):
        check_keys({**document, "nodes": 2}, SKYPILOT)


def test_dstack_has_only_known_keys() -> None:
    document = read("dstack.yml")
    check_keys(document, DSTACK)
    assert all(isinstance(one, str) for one in document["commands"])
    assert document["type"] == "task"
    name, value = document["env"][0].split("=", 1)
    assert (name, value[:11]) == ("TORCHMUSTER_JOIN_SECRET", "${{ secrets")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_skypilot_starts(stubs: Path, rank: int) -> None:
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_TASK_ID": "sky-2026-11-18-12-00-00-563597_Cluster_1_train",
    }
    words, group = started(stubs, read("skypilot.yaml")["run"], variables)
    assert words == ["run", "--max-restarts", "3", "--runs", "runs", "train.py"]
    assert (group.nodes, group.node_rank, group.launcher, group.port) == (
        2,
        rank,
        "10.0.0.4",
        29399,
    )
    assert group.job_uid == variables["SKYPILOT_TASK_ID"]
    _, again = started(stubs, read("skypilot.yaml")["run"], variables)
    _, other = started(
        stubs, read("skypilot.yaml")["run"], variables | {"SKYPILOT_TASK_ID": "sky-2"}
    )
    assert group.run_id == again.run_id != other.run_id


@pytest.mark.parametrize("rank", [0, 1])
def test_what_dstack_starts(stubs: Path, rank: int) -> None:
    variables = {
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": str(rank),
        "DSTACK_MASTER_NODE_IP": "10.0.0.4",
        "DSTACK_RUN_NAME": "train",
    }
    words, group = started(stubs, " && ".join(read("dstack.yml")["commands"]), variables)
    assert words == ["run", "--max-restarts", "3", "--runs", "runs", "train.py"]
    assert (group.nodes, group.node_rank, group.launcher, group.port) == (
        2,
        rank,
        "10.0.0.4",
        29399,
    )
    assert group.run_id == "train"
