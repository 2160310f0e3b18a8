"""``muster run`` before anything starts: what it refuses and how, and what ``--dry-run`` shows."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster, Result
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario

pytestmark = pytest.mark.slow

Machine = Callable[[Scenario], Path]


@pytest.fixture
def run(muster: Muster, own_machine: Path) -> Callable[..., Result]:
    """Run ``muster run``; whatever it says, nothing may have been made or started."""
    (own_machine / "train.py").write_text("print('training')\n")

    def call(*words: str, env: dict[str, str] | None = None) -> Result:
        result = muster("run", *words, env=env)
        assert not (own_machine / "runs").exists()
        assert "Traceback" not in result.err
        return result

    return call


Run = Callable[..., Result]


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ([], "muster run train.py"),
        (["nope.py"], "'nope.py'"),
        (["train"], "muster run train.py"),
        (["-m", "nope.train"], "'nope.train'"),
        (["--device", "cpu", "--num-gpus", "2", "train.py"], "--ranks 2"),
        (["--ranks", "3", "--num-gpus", "2", "train.py"], "--ranks 3"),
        (["--hosts", "", "train.py"], "launch.hosts"),
        (["--hosts", "a,-oProxyCommand=x", "train.py"], "--hosts a,b:4"),
        (["--hosts", "a,a", "train.py"], "--hosts a:2"),
        (["--env", "NOT_SET_HERE", "train.py"], "NOT_SET_HERE=VALUE"),
        (["--max-restarts", "-1", "train.py"], "launch.max_restarts"),
        (["--max-restarts", "many", "train.py"], "launch.max_restarts"),
        (["--set", "nope=1", "train.py"], "--set nope:"),
        (["--resume-with", "--from '{path}", "train.py"], "no closing quotation"),
        (["--resume-with", " ", "train.py"], "--resume_from {path}"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_refused_in_a_sentence(
    run: Run, words: list[str], fact: str, snapshot: SnapshotAssertion
) -> None:
    result = run(*words)
    assert (result.code, result.out) == (2, "")
    assert fact in result.err
    assert result.err == snapshot


def plan(result: Result) -> dict[str, Any]:
    assert result.code == 0, result
    told: dict[str, Any] = json.loads(result.out)
    return told


def test_a_dry_run_shows_what_would_be_started(run: Run) -> None:
    words = ("--dry-run", "--device", "cpu", "--ranks", "2", "train.py", "--lr", "1e-4")
    told = plan(run("--json", *words))
    assert [(host["ranks"], host["devices"]) for host in told["hosts"]] == [(2, ["CPU"])]
    assert told["command"] == [sys.executable, "train.py", "--lr", "1e-4"]
    result = run(*words)
    assert (result.code, result.err) == (0, "")
    assert "train.py --lr 1e-4" in result.out
    assert result.out.endswith("nothing was started or claimed\n")


def test_a_dry_run_over_ssh_shows_the_hosts(run: Run) -> None:
    words = ["--dry-run", "--json", "--hosts", "a,ana@b:4,[fd00::1]:2", "--max-restarts", "3"]
    told = plan(run(*words, "--set", "launch.remote_python=/opt/my py", "train.py"))
    assert [(host["host"], host["ranks"]) for host in told["hosts"]] == [
        ("a", None),
        ("ana@b", 4),
        ("fd00::1", 2),
    ]
    assert told["command"] == ["/opt/my py", "train.py"]
    assert told["max_restarts"] == 3
    spares = plan(run("--dry-run", "--json", "--hosts", "a,b,c", "--spares", "1", "train.py"))
    assert [host["spare"] for host in spares["hosts"]] == [False, False, True]


def test_a_dry_run_hides_secrets_and_shows_what_is_passed_on(run: Run) -> None:
    secret = "hf_" + "a" * 30
    env = {"HF_TOKEN": secret, "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "OTHER": "kept here"}
    words = ["--dry-run", "--device", "cpu", "--env", "HF_TOKEN", "--env", "FOO=a b", "train.py"]
    result = run(*words, "--api-key", "s3cr3t", env=env)
    assert secret not in result.out
    assert "s3cr3t" not in result.out
    assert "  HF_TOKEN='[redacted]'\n" in result.out
    assert "  FOO='a b'\n" in result.out
    assert "  NCCL_DEBUG=INFO\n" in result.out
    assert "  OMP_NUM_THREADS=3\n" in result.out
    assert "OTHER" not in result.out


def test_a_dry_run_on_gpus_names_them_and_claims_none(
    run: Run, machine: Machine, muster: Muster
) -> None:
    machine(scenarios.eight_a100_idle())
    told = plan(run("--dry-run", "--json", "--num-gpus", "2", "train.py"))
    assert len(told["hosts"][0]["devices"]) == 2
    assert muster("gpus", "pick", "--num-gpus", "8").code == 0


def test_settings_from_a_file_and_the_environment(run: Run, own_machine: Path) -> None:
    (own_machine / "config.yaml").write_text(
        "launch:\n  hosts: [a, 'b:2']\n  max_restarts: 1\n  remote_python: /opt/py\n"
    )
    words = ["--dry-run", "--json", "--config", "config.yaml", "train.py"]
    told = plan(run(*words))
    assert [(one["host"], one["ranks"]) for one in told["hosts"]] == [("a", None), ("b", 2)]
    assert told["max_restarts"] == 1
    stronger = {"TORCHMUSTER_LAUNCH_MAX_RESTARTS": "4", "TORCHMUSTER_LAUNCH_HOSTS": "c,d:1"}
    told = plan(run(*words, env=stronger))
    assert [one["host"] for one in told["hosts"]] == ["c", "d"]
    assert told["max_restarts"] == 4
    told = plan(run("--hosts", "e", *words, env=stronger))
    assert [one["host"] for one in told["hosts"]] == ["e"]
