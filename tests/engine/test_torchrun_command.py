"""Pasted commands: ``muster run torchrun …`` is parsed by torch's own parser."""

import sys
from pathlib import Path

import pytest

from torchmuster.cli.launch_options import RunOptions
from torchmuster.cli.torchrun import translated
from torchmuster.errors import Impossible
from torchmuster.launch.job import NodeCounts


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def options(command: str, **given: object) -> RunOptions:
    return translated(RunOptions(script=tuple(command.split()), **given))  # type: ignore[arg-type]


def test_flags_of_torchrun_become_options() -> None:
    result = options(
        "torchrun --nnodes=1:2 --nproc_per_node 3 --max-restarts 2 --rdzv-backend c10d "
        "--rdzv-endpoint 10.0.0.1:29501 --rdzv-conf join_timeout=300 --log-dir logs --role trainer "
        "--shutdown-timeout 60 -t 3 train.py --lr 1"
    )
    assert result.script == ("train.py", "--lr", "1")
    assert (result.ranks, result.max_restarts) == (3, "2")
    assert result.nodes == NodeCounts(least=1, most=2)
    assert result.runs == Path("logs")
    assert result.env == ("ROLE_NAME=trainer",)
    assert {flag.path: flag.text for flag in result.set} == {
        "launch.address": "10.0.0.1",
        "distributed.master_port": "29501",
        "launch.join_timeout": "300",
        "launch.grace": "60",
    }


def test_torchrun_without_a_number_starts_one_rank_and_takes_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert options("torchrun train.py").ranks == 1
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    result = options("torchrun -m package.train")
    assert (result.ranks, result.script) == (4, ("-m", "package.train"))


def test_flags_of_muster_override_those_of_torchrun() -> None:
    command = "python -m torch.distributed.run --nproc-per-node 2 train.py"
    result = options(command, ranks=5)
    assert (result.ranks, result.script) == (5, ("train.py",))
    assert options(command, device="cpu").ranks == 2


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py --lr 1", ("train.py", "--lr", "1")),
        ("python3 -u -m package.train", ("-m", "package.train")),
        (f"{sys.executable} train.py", ("train.py",)),
        ("train.py torchrun", ("train.py", "torchrun")),
    ],
)
def test_python_in_front_of_a_script_is_left_out(command: str, script: tuple[str, ...]) -> None:
    assert options(command).script == script


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        ("torchrun --node-rank 1 --nnodes 2 train.py", "--node-rank"),
        ("torchrun --virtual-local-rank train.py", "--virtual-local-rank"),
        ("torchrun --nproc-per-node many train.py", "--nproc-per-node many"),
        ("python -c 1", "after python"),
    ],
)
def test_what_cannot_be_translated_is_refused_with_a_fix(command: str, fact: str) -> None:
    with pytest.raises(Impossible) as caught:
        options(command)
    assert fact in caught.value.what
    assert caught.value.fix


def test_a_mistake_ends_as_torchrun_would(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options("torchrun --nproc-per-noed 2 train.py")
    assert caught.value.code == 2
    assert capfd.readouterr().err.startswith("usage: torchrun")
