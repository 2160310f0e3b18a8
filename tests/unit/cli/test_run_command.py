"""``muster run`` before anything starts: what it refuses and how, and what ``--dry-run`` shows."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
        (["accelerate", "launch", "train.py"], "'accelerate'"),
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
def test_what_cannot_be_is_refused_in_a_sentence(run: Run, words: list[str], fact: str) -> None:
    result = run(*words)
    assert (result.code, result.out) == (2, "")
    assert fact in result.err


def lines(result: Result) -> list[str]:
    assert (result.code, result.err) == (0, "")
    return result.out.splitlines()


def test_a_dry_run_shows_what_would_be_started(run: Run, own_machine: Path) -> None:
    words = ("--dry-run", "--device", "cpu", "--ranks", "2", "train.py", "--lr", "1e-4")
    shown = lines(run(*words))
    assert shown[:2] == ["this host: 2 ranks", "  CPU"]
    assert shown[-3:] == [
        f"each rank runs, in {own_machine}:",
        "  python train.py --lr 1e-4",
        "nothing was started or claimed",
    ]


def test_a_dry_run_over_ssh_shows_the_hosts(run: Run) -> None:
    hosts = ("--hosts", "a,ana@b:4,[fd00::1]:2,c", "--spares", "1")
    assert lines(run("--dry-run", *hosts, "train.py"))[:4] == [
        "a: one rank per GPU",
        "ana@b: 4 ranks",
        "fd00::1: 2 ranks",
        "c: spare; it takes the place of a host that fails",
    ]


def test_a_dry_run_hides_secrets(run: Run) -> None:
    words = ["--dry-run", "--device", "cpu", "train.py", "--api-key", "s3cr3t"]
    assert "s3cr3t" not in run(*words).out


def test_a_dry_run_on_gpus_names_them_and_claims_none(
    run: Run, machine: Machine, muster: Muster
) -> None:
    machine(scenarios.eight_a100_idle())
    shown = lines(run("--dry-run", "--num-gpus", "2", "train.py"))
    assert shown[0] == "this host: 2 ranks"
    assert "A100" in shown[1]
    assert "A100" in shown[2]
    assert muster("gpus", "pick", "--num-gpus", "8").code == 0


def test_settings_from_a_file_and_the_environment(run: Run, own_machine: Path) -> None:
    (own_machine / "config.yaml").write_text("launch:\n  hosts: [a, 'b:2']\n")
    words = ["--dry-run", "--config", "config.yaml", "train.py"]
    assert lines(run(*words))[:2] == ["a: one rank per GPU", "b: 2 ranks"]
    stronger = {"TORCHMUSTER_LAUNCH_HOSTS": "c,d:1"}
    assert lines(run(*words, env=stronger))[:2] == ["c: one rank per GPU", "d: 1 rank"]
    assert lines(run("--hosts", "e", *words, env=stronger))[0] == "e: one rank per GPU"
