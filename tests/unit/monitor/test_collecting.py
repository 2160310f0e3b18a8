"""What a machine, its runs and their ranks are like becomes samples, each said once."""

import dataclasses
import json
import math
from pathlib import Path

import msgspec
import pytest

from made_up_runs import LINE, NOW, add_event
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Device, DeviceKind, Ecc, Node
from torchmuster.devices.tickets import Ticket
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.history import node_records, run_state
from torchmuster.monitor.collecting.collector import Collector
from torchmuster.monitor.metric import Sample
from torchmuster.runfolder import RunFolder, create_run_folder, write_atomically


def _node() -> Node:
    cpu = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="a cpu")
    gpu = Device(
        kind=DeviceKind.CUDA,
        index=0,
        uuid="GPU-1",
        name="a gpu",
        total_bytes=100,
        used_bytes=40,
        reserved_bytes=10,
        utilization_percent=90,
        ecc=Ecc(enabled=True, corrected=3, uncorrected=None),
        throttled_by=("heat",),
        energy_j=81.5,
    )
    return Node(hostname="a", taken_unix_s=NOW, accelerators=(gpu,), cpu=cpu)


class Watched:
    """A run folder in which lines appear, and what is collected of it."""

    def __init__(self, folder: Path) -> None:
        self.run: RunFolder = create_run_folder(folder / "runs", "llm")
        self.now = NOW
        self.collector = Collector(folder / "runs", _node, clock=lambda: self.now)

    def state(self, phase: str, **more: object) -> None:
        if not self.run.events.exists():
            add_event(self.run, "launched", NOW - 100)
        add_event(self.run, phase, NOW - 50, **more)

    def line(self, **changed: object) -> None:
        with (self.run.metrics / "steps.jsonl").open("a") as stream:
            stream.write(json.dumps(LINE | changed) + "\n")

    def launched_on(self, host: str) -> None:
        launcher = {"host": host, "pid": 1, "start_s": 1.0}
        job = {"command": ["x"], "folder": "/", "hosts": [], "launcher": launcher, "token": ""}
        job |= {"grace_s": 5.0, "slurm_job": None, "module": False}
        job |= {"typed": [], "flags": [], "resume_with": []}
        write_atomically(self.run.job, json.dumps(job))

    def ranks_of(self, host: str, heartbeats: tuple[Heartbeat, ...]) -> None:
        """Let a machine write what its ranks are doing."""
        content = node_records.NodeRanks(host=host, attempt=0, at_unix_s=NOW, ranks=heartbeats)
        path = node_records.node_record_path(self.run, host, heartbeats[0].rank)
        path.parent.mkdir(parents=True)
        path.write_bytes(msgspec.json.encode(content))

    def seen_from(self, host: str) -> dict[str, float]:
        """Return what another machine's exporter tells."""
        node = dataclasses.replace(_node(), hostname=host)
        clock = lambda: self.now  # noqa: E731
        collector = Collector(self.run.path.parent, lambda: node, clock=clock)
        return {_key(one, self.run.id): one.value for one in collector.samples()}

    def look(self) -> dict[str, float]:
        """Return values by name, with the labels besides those that all have."""
        self.now += 10
        found = {}
        for sample in self.collector.samples():
            key = _key(sample, self.run.id)
            assert key not in found, key
            found[key] = sample.value
        return found


def _key(sample: Sample, run: str) -> str:
    own = [one for one in sample.labels if one not in ("llm", run, "a")]
    return " ".join([sample.metric.name.removeprefix("muster_"), *own])


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_its_steps(watched: Watched) -> None:
    watched.state("running")
    watched.line()
    watched.line(step=20, loss=None, learning_rate=5e-5, gradient_norm=3.0, mfu=0.4)
    seen = watched.look()
    assert seen["train_steps_total"] == 20
    assert math.isnan(seen["train_loss"])
    assert seen["train_skipped_steps_total"] == 2
    assert seen["train_learning_rate"] == 5e-5
    assert seen["train_gradient_norm"] == 3.0
    assert seen["train_mfu_ratio"] == 0.4
    assert seen["train_time_ratio data"] == 0.1
    assert "train_tokens_per_second" not in seen, "the loss counts nothing"
    # 20 steps of 2 s, 2 of which were skipped, a tenth of which was saving, in 110 s
    assert seen["train_goodput_ratio"] == pytest.approx(32.4 / 110)


def test_steps_that_are_done_again_count_once(watched: Watched) -> None:
    watched.state("running")
    watched.line()
    watched.line(step=20)
    watched.look()
    write_atomically(watched.run.metrics / "steps.jsonl", json.dumps(LINE) + "\n")
    run_state.log_event(watched.run, run_state.RESTART)
    seen = watched.look()
    assert seen["train_steps_total"] == 10
    assert seen["train_skipped_steps_total"] == 1
    assert seen["train_goodput_ratio"] == pytest.approx(16.2 / 120)
    assert seen["run_restarts_total"] == 1


def test_a_run_that_goes_on_after_its_end_is_held_against_all_its_time(watched: Watched) -> None:
    """Its state begins anew with ``--resume``, its lines do not."""
    events = [
        {"at_unix_s": NOW - 1000, "event": "launched"},
        {"at_unix_s": NOW - 900, "event": "failed", "exit_code": 1},
        {"at_unix_s": NOW - 100, "event": "launched"},
    ]
    text = "".join(json.dumps(one) + "\n" for one in events)
    watched.run.events.write_text(text)
    watched.state("running")
    watched.line(checkpoint_share=0.0, skipped_steps=0)
    seen = watched.look()
    # 10 steps of 2 s, in 100 s before and 110 s now
    assert seen["train_goodput_ratio"] == pytest.approx(20 / 210)


@pytest.mark.parametrize(
    ("scale", "is_known"),
    [(None, True), (0.5, True), (65536.0, False)],
    ids=["no fp16", "no scale can help", "fp16 looks for its scale"],
)
def test_a_loss_that_nobody_knows_is_not_called_bad(
    watched: Watched, scale: float | None, is_known: bool
) -> None:
    watched.state("running")
    watched.line(loss=None, loss_scale=scale)
    seen = watched.look()
    assert math.isnan(seen.get("train_loss", 0.0)) is is_known


def test_what_a_training_says_of_its_saves(watched: Watched) -> None:
    """Also where they go to object storage, and where none of them comes about."""
    watched.state("running")
    saves = watched.run.metrics / "saves.jsonl"
    saves.touch()
    assert watched.look()["checkpoint_age_seconds"] == 110, "since the start: nothing is saved"

    def save(at_s: float, step: int, problem: str, stall_s: float) -> dict[str, float]:
        line = {"at_unix_s": NOW + at_s, "step": step, "stall_s": stall_s, "problem": problem}
        with saves.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        return watched.look()

    seen = save(-5, 7, "the disk is full", 0.5)
    assert seen["checkpoint_age_seconds"] == 120
    assert seen["checkpoint_stall_seconds"] == 0.5
    assert "checkpoint_step" not in seen
    seen = save(0, 8, "", 0.25)
    assert (seen["checkpoint_age_seconds"], seen["checkpoint_step"]) == (30, 8)
    assert seen["checkpoint_stall_seconds"] == 0.25


def test_a_damaged_line_is_counted_as_far_as_it_can_be_read(watched: Watched) -> None:
    watched.state("running")
    watched.line(skipped_steps="x", checkpoint_share=[1], evaluation_share="y")
    seen = watched.look()
    assert seen["train_skipped_steps_total"] == 0
    assert seen["train_goodput_ratio"] == pytest.approx(20 / 110)


def test_an_evaluation(watched: Watched) -> None:
    watched.state("running")
    numbers = {"step": 5, "epoch": 0, "accuracy": 0.5, "note": "none"}
    (watched.run.metrics / "evaluations.jsonl").write_text(json.dumps(numbers) + "\n")
    seen = watched.look()
    assert seen["train_evaluation accuracy"] == 0.5
    assert "train_evaluation note" not in seen


def test_the_ranks_of_machines_that_are_there(watched: Watched) -> None:
    watched.state("running")
    heartbeats = tuple(
        Heartbeat(rank=rank, pid=1, beat=1, moves=1, step=7, communication_share=0.25)
        for rank in (0, 1)
    )
    for first, (attempt, at_s) in enumerate(((1, NOW), (1, NOW - 60), (0, NOW))):
        content = node_records.NodeRanks(
            host="a", attempt=attempt, at_unix_s=at_s, ranks=heartbeats
        )
        path = node_records.node_record_path(watched.run, "a", first)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(content))
    seen = watched.look()
    assert seen["run_ranks"] == 2, "of the machine that was heard of lately, in this attempt"
    assert seen["rank_step 1"] == 7
    assert seen["rank_communication_ratio 0"] == 0.25
    assert "rank_data_ratio 0" not in seen


def test_what_an_agent_writes_is_read(watched: Watched) -> None:
    watched.state("running")
    heartbeat = Heartbeat(rank=4, pid=1, beat=1, moves=1, memory_bytes=77)
    node_records.write_node_ranks(
        watched.run, host="b", exporter="b", attempt=0, heartbeats=(heartbeat,)
    )
    (found,) = node_records.read_node_ranks(watched.run, now_unix_s=0.0)
    assert (found.host, found.ranks) == ("b", (heartbeat,))
    assert node_records.read_node_ranks(watched.run, now_unix_s=0.0, of_host="b") == [found]
    assert node_records.read_node_ranks(watched.run, now_unix_s=0.0, of_host="another") == []


def test_each_machine_tells_of_its_own_ranks_and_one_or_two_of_the_run(watched: Watched) -> None:
    """On a shared disk all exporters see all files, and each series must come once."""
    watched.state("running")
    watched.line()
    watched.launched_on("login")
    for rank, host in enumerate(("a", "b")):
        heartbeat = Heartbeat(rank=rank, pid=1, beat=1, moves=1, step=7)
        watched.ranks_of(host, (heartbeat,))
    seen = watched.look()
    assert seen["run_ranks"] == 2, "all of them"
    assert "rank_step 0" in seen
    assert "rank_step b 1" not in seen, "that is for b's exporter to tell"
    of_steps = [key for key in seen if key.startswith("train_")]
    assert of_steps, "a runs the first rank, so it speaks for the run"
    elsewhere = watched.seen_from("b")
    assert not [key for key in elsewhere if key.startswith(("train_", "run_"))]
    assert "rank_step b 1" in elsewhere
    assert "run_ranks" in watched.seen_from("login"), "it launched the run"


def test_devices_and_the_machine(watched: Watched) -> None:
    seen = watched.look()
    assert seen["gpu_utilization_ratio GPU-1"] == 0.9
    assert seen["gpu_memory_usable_bytes GPU-1"] == 90
    assert seen["gpu_ecc_errors_total GPU-1 corrected"] == 3
    assert "gpu_ecc_errors_total GPU-1 uncorrected" not in seen, "it could not be read"
    assert seen["gpu_throttled GPU-1 heat"] == 1
    assert "gpu_power_watts GPU-1" not in seen
    assert seen["gpu_energy_joules_total GPU-1"] == 81.5
    assert seen["host_memory_bytes"] > seen["host_memory_available_bytes"] > 0


def test_the_queue_and_the_claims_of_the_machine(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHMUSTER_CLAIMS_DIR", str(tmp_path / "claims"))
    seen = watched.look()
    assert not (tmp_path / "claims").exists(), "a look creates nothing"
    assert (seen["queue_requests"], seen["gpus_claimed"]) == (0, 0)
    claims = Claims(tmp_path / "claims")
    with claims.gate():
        claim = claims.take("GPU-1", "0a", "train.py")
        ticket = Ticket(claims.queue, 1, ["GPU-1"])
    try:
        watched.now += 2
        seen = watched.look()
        assert (seen["queue_requests"], seen["gpus_claimed"]) == (1, 1)
    finally:
        ticket.release()
        claim.release()


def test_a_run_is_told_of_for_a_while_after_its_end(watched: Watched) -> None:
    watched.state("finished", exit_code=0)
    assert watched.look()["run_phase finished"] == 1
    watched.now += 3600
    assert "run_phase finished" not in watched.look()
