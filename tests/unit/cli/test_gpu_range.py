"""``--num-gpus MIN:MAX`` and ``--borrow``: which numbers of ranks a run may have, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.cli.gpu_range import useful_counts
from torchmuster.train.data.batch_split import split_batch

CONFIG = """\
model: {build: "own:model", loss: cross_entropy}
data: {dataset: "own:data"}
train: {steps: 2, global_batch_size: 16}
"""


@pytest.mark.parametrize(
    ("least", "most", "batch", "micro", "counts"),
    [
        (2, 8, 64, None, (2, 3, 4, 5, 6, 7, 8)),
        (2, 8, 16, None, (2, 3, 4, 6, 8)),
        (1, 8, 4, None, (1, 2, 4)),
        (2, 8, 64, 8, (2, 3, 4, 5, 6, 7, 8)),
        (2, 8, 12, 1, (2, 3, 4, 6)),
        (4, 4, 64, None, (4,)),
        (8, 8, 2, None, (8,)),
    ],
)
def test_ranks_that_make_no_step_faster_are_not_used(
    least: int, most: int, batch: int, micro: int | None, counts: tuple[int, ...]
) -> None:
    found = useful_counts(least, most, global_batch_size=batch, micro_batch_size=micro)
    assert found == counts


@given(batch=st.integers(1, 64), micro=st.none() | st.integers(1, 16), least=st.integers(1, 4))
def test_the_slowest_rank_of_the_split_batch_decides(
    batch: int, micro: int | None, least: int
) -> None:
    counts = useful_counts(least, 8, global_batch_size=batch, micro_batch_size=micro)

    def slowest(ranks: int) -> int:
        split = split_batch(ranks, global_batch_size=batch, micro_batch_size=micro)
        samples: int = max(
            # A rank without samples computes one with weight 0.
            sum(max(1, one.stop - one.start) for one in split.slices(batch, rank))
            for rank in range(ranks)
        )
        return samples

    times = [slowest(count) for count in counts]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)
    for count in range(least, 9):
        assert min(times[place] for place, one in enumerate(counts) if one <= count) <= slowest(
            count
        )


@pytest.fixture
def server(machine: Callable[[Scenario], Path], own_machine: Path) -> Path:
    machine(scenarios.eight_a100_idle())
    (own_machine / "config.yaml").write_text(CONFIG)
    small = CONFIG.replace("global_batch_size: 16", "micro_batch_size: 2")
    (own_machine / "small.yaml").write_text(small)
    (own_machine / "own.py").write_text("def model():\n    pass\n\n\ndef data():\n    pass\n")
    (own_machine / "x.py").write_text("")
    return own_machine


TRAIN = ("train", "--config", "config.yaml")
REFUSED = {
    "a script": ("run", "--gpus", "2:8", "--borrow", "x.py"),
    "no minimum": (*TRAIN, "--borrow"),
    "a range from high to low": (*TRAIN, "--gpus", "8:2"),
    "other hosts": (*TRAIN, "--gpus", "2:8", "--borrow", "--hosts", "a,b"),
    "named GPUs": (*TRAIN, "--gpus", "2:8", "--gpu-ids", "0", "1"),
    "no global batch size": ("train", "--config", "small.yaml", "--gpus", "2:8", "--borrow"),
    "no checkpoints": (*TRAIN, "--gpus", "2:8", "--borrow", "--set", "checkpoint.enabled=false"),
    "in use": (*TRAIN, "--gpus", "2:8", "--borrow", "--share"),
    "a duration": (*TRAIN, "--gpus", "2:8", "--borrow", "--set", "launch.borrow_every=often"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(server: Path, muster: Muster, name: str, snapshot: SnapshotAssertion) -> None:
    told = muster(*REFUSED[name])
    assert (told.code, told.out) == (2, "")
    assert told.err == snapshot
    assert not (server / "runs").exists()


def test_a_dry_run_shows_what_would_be_borrowed(server: Path, muster: Muster) -> None:
    told = muster(*TRAIN, "--gpus", "2:8", "--borrow", "--dry-run", "--json")
    assert told.code == 0, told
    (machine,) = json.loads(told.out)["machines"]
    assert machine["ranks"] == 2
    assert any("borrowed" in reason for reason in machine["reasons"])
