"""GPUs that a run borrows: given back within 30 s, and the losses stay those of a run that never changed."""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import BUSY_S, GIVE_UP_S
from ranks.launched import Launched, launched
from torchmuster.launch.history import failure_report, run_state
from torchmuster.runfolder import list_runs

pytestmark = pytest.mark.ranks

Machine = Callable[[Scenario], Path]
STEPS, MANY_STEPS = 12, 300
# Each rank waits before the steps that the test names with files, so that changes happen there.
OWN = """\
import os, time
import torch
from torch import nn

class Held(nn.Linear):
    def forward(self, x):
        if self.training and torch.distributed.is_initialized():
            from torchmuster.train.progress import progress
            while os.path.exists(f"hold-{progress.step}"):
                time.sleep(0.02)
            time.sleep(0.1 if os.path.exists("slow") else 0.0)
        return super().forward(x)

def model():
    torch.manual_seed(0)
    return Held(4, 3)

def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(1) % 3)
"""
CONFIG = """\
model: {build: "own:model", loss: cross_entropy}
data: {dataset: "own:data"}
train: {steps: %d, global_batch_size: 8, log_every: 1}
launch: {borrow_every: 1s}
"""


@pytest.fixture
def server(machine: Machine, own_machine: Path) -> Path:
    machine(scenarios.eight_a100_idle())
    (own_machine / "own.py").write_text(OWN)
    (own_machine / "config.yaml").write_text(CONFIG % STEPS)
    return own_machine


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics" / "steps.jsonl").read_text().splitlines()
    return {told["step"]: told["loss"] for told in map(json.loads, lines)}


def borrowed(muster: Muster) -> int:
    told = json.loads(muster("gpus", "--json").out)["accelerators"]
    return sum(bool(one["claim"] and one["claim"]["borrowed"]) for one in told)


@contextlib.contextmanager
def borrower(server: Path, gpus: str, *words: str) -> Iterator[Launched]:
    flags = ("train", "--config", "config.yaml", "--gpus", gpus, "--borrow", "--max-restarts", "0")
    with launched(server, *flags, *words) as run:
        yield run


def ask(muster: Muster, count: int) -> float:
    """Claim GPUs for a moment; return how long it took to get them."""
    began_s = time.monotonic()
    got = muster("gpus", "pick", "--num", str(count), "--", "true")
    assert got.code == 0, got
    return time.monotonic() - began_s


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + GIVE_UP_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def events(run: Launched, *names: str) -> list[run_state.RunEvent]:
    return [one for one in run_state.read_events(run.run) if one.name in names]


def test_a_borrower_gives_back_and_its_losses_stay_the_same(server: Path, muster: Muster) -> None:
    hold = server / "hold-6"
    hold.touch()
    with borrower(server, "1:2", "--set", "launch.borrow_every=1h") as run:
        run.wait_for("step 3/")
        assert borrowed(muster) == 1
        hold.unlink()
        took_s = ask(muster, 7)
        result = run.end()
    assert result.code == 0, run
    assert took_s < 30.0 + BUSY_S
    (given,) = events(run, run_state.GIVEN_BACK)
    assert given.facts["seconds"] < 30.0
    assert len(given.facts["gpus"]) == 1
    assert "requested 7 GPUs" in given.facts["reason"]
    started = [one.facts["ranks"] for one in events(run, "started")]
    assert started[0] == 2
    assert losses(run.run.path).keys() == set(range(1, STEPS + 1))


def test_it_grows_and_shrinks_and_computes_what_one_rank_computes(
    server: Path, muster: Muster
) -> None:
    (server / "config.yaml").write_text(CONFIG % MANY_STEPS)
    (server / "slow").touch()
    (server / "hold-8").touch()
    (server / f"hold-{MANY_STEPS}").touch()
    with launched(server, "gpus", "pick", "--num", "7", "--", "sleep", "600") as holder:
        holder.wait_for("7 GPUs requested")
        with borrower(server, "1:4") as run:
            run.wait_for("step 6/")
            assert borrowed(muster) == 0
            holder.process.kill()
            wait_until(lambda: borrowed(muster) == 3)
            (server / "hold-8").unlink()
            run.wait_for("borrowed GPU", "4 ranks started", "step 12/")
            assert ask(muster, 6) < 30.0 + BUSY_S
            run.wait_for("gave back GPU")
            run.wait_for_more("step ")
            assert ask(muster, 7) < 30.0 + BUSY_S
            (server / "slow").unlink()
            (server / f"hold-{MANY_STEPS}").unlink()
            result = run.end()
    assert result.code == 0, run
    assert len(events(run, run_state.GIVEN_BACK)) >= 2
    assert len(events(run, run_state.BORROWED)) >= 1
    moved = losses(run.run.path)
    told = failure_report.Timeline.of(run.run).moments()
    assert sum("gave back GPU" in one.what for one in told) >= 2
    alone = ("train", "--config", "config.yaml", "--device", "cpu", "--ranks", "1")
    with launched(server, *alone, "--runs", "alone") as still:
        assert still.end().code == 0, still
    (reference_run,) = list_runs(server / "alone")
    reference = losses(reference_run.path)
    assert moved.keys() == reference.keys() == set(range(1, MANY_STEPS + 1))
    worst = max(abs(moved[step] - reference[step]) for step in reference)
    assert worst < 1e-6


def test_ranks_that_cannot_save_in_time_are_killed_and_resume(server: Path, muster: Muster) -> None:
    (server / "hold-6").touch()
    with borrower(server, "1:2", "--set", "checkpoint.every=2") as run:
        run.wait_for("step 4/")
        took_s = ask(muster, 7)
        (server / "hold-6").unlink()
        result = run.end()
    assert result.code == 0, run
    assert 15.0 < took_s < 30.0 + BUSY_S
    assert losses(run.run.path).keys() == set(range(1, STEPS + 1))
    assert not (run.run.path / "failures").exists()


@pytest.mark.parametrize("victim", ["launcher", "node agent"])
def test_nothing_stays_claimed_after_a_kill(server: Path, muster: Muster, victim: str) -> None:
    (server / "hold-3").touch()
    with borrower(server, "1:3") as run:
        run.wait_for("step 1/")
        assert borrowed(muster) == 2
        agents = [one for one in run.alive() if "torchmuster.launch.node" in one.cmdline()]
        chosen = run.process if victim == "launcher" else agents[0]
        chosen.send_signal(signal.SIGKILL)
        (server / "hold-3").unlink()  # without their launcher, ranks save before they exit
        run.end()
        run.wait_until_nothing_lives(35.0)
    assert muster("gpus", "pick", "--num", "8").code == 0
    assert borrowed(muster) == 0


def test_a_stop_request_ends_a_borrower_as_any_other_run(server: Path, muster: Muster) -> None:
    (server / "hold-3").touch()
    with borrower(server, "1:3") as run:
        run.wait_for("step 1/")
        (server / "hold-3").unlink()
        run.send(signal.SIGTERM)
        result = run.end()
    assert result.code == 75, run
    with launched(server, "train", "--resume", "last") as again:
        assert again.end().code == 0, again
    assert losses(again.run.path).keys() == set(range(1, STEPS + 1))
    assert list_runs(server / "runs") == [again.run]
