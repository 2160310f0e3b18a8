"""The smoke program under plain torchrun and alone: its lines are what people compare with."""

import re
import socket
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from ranks.conftest import Python, Torchrun
from torchmuster.launch.probes import smoke

pytestmark = pytest.mark.ranks

MODULE = "torchmuster.launch.probes.smoke"


@pytest.mark.parametrize("ranks", [2, 3])
def test_under_torchrun_every_rank_says_its_three_lines(torchrun: Torchrun, ranks: int) -> None:
    ran = torchrun("-m", MODULE, ranks=ranks)
    assert ran.code == 0, ran.err
    for rank in range(ranks):
        assert ran.of_rank(rank) == [
            f"world_size={ranks} device=cpu hostname={socket.gethostname()}",
            f"gathered={list(range(ranks))}",
            "barrier OK; shutting down",
        ]
    assert len(ran.out.splitlines()) == 3 * ranks


def test_alone_it_is_a_group_of_one(python: Python) -> None:
    ran = python(str(Path(smoke.__file__)))
    assert ran.code == 0, ran.err
    assert ran.of_rank(0) == [
        f"world_size=1 device=cpu hostname={socket.gethostname()}",
        "gathered=[0]",
        "barrier OK; shutting down",
    ]
    assert len(ran.out.splitlines()) == 3


def test_a_wrong_value_ends_it_with_a_sentence(
    torchrun: Torchrun, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    # Rank 1's number never arrives, as on cards whose peer-to-peer copies return nothing.
    program = tmp_path / "broken.py"
    program.write_text(
        "import sys, torch.distributed as dist\n"
        "from torchmuster.launch.probes import smoke\n"
        "gather = dist.all_gather\n"
        "def lossy(places, mine):\n"
        "    gather(places, mine)\n"
        "    places[1].zero_()\n"
        "dist.all_gather = lossy\n"
        "sys.exit(smoke.main())\n"
    )
    ran = torchrun(str(program))
    assert ran.code != 0
    # The first rank to end may take the other with it.
    assert "gathered=[0, 0]" in ran.out
    assert "barrier OK" not in ran.out
    wrong = [line for line in ran.err.splitlines() if "gathered [0, 0], expected [0, 1]" in line]
    assert re.sub(r"^\[rank \d\]", "[rank R]", wrong[0]) == snapshot


def test_what_a_launcher_set_wrongly_is_told(python: Python, snapshot: SnapshotAssertion) -> None:
    ran = python("-m", MODULE, env={"RANK": "first"})
    assert (ran.code, ran.out) == (2, "")
    assert "[rank 0] RANK=first " in ran.err
    assert ran.err == snapshot


def test_a_place_that_nothing_reached_is_not_taken_for_rank_0() -> None:
    assert smoke.wrong_values([0, 1], 2) == ""
    assert smoke.wrong_values([-1, 1], 2).endswith("gathered [-1, 1], expected [0, 1]")
    assert smoke.wrong_values([0], 2).endswith("gathered [0], expected [0, 1]")
