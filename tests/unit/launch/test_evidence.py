"""What a run's folder keeps of failures, hangs and events: bounded, redacted, and readable when torn."""

import json
import time
from pathlib import Path

import pytest

from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.history import evidence, run_state
from torchmuster.launch.history.root_cause import NodeExit
from torchmuster.runfolder import RunFolder, create_run_folder

SECRET = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "runs", "train")


def told(what: str = "rank 1 on a failed: it is late", **more: str) -> Finding:
    return Finding(name="rank-failed", status=Status.FAILURE, what=what, **more)


def ends(*failures: protocol.Failure, host: str = "a") -> list[NodeExit]:
    ended = protocol.Ended(attempt=0, good=False, failures=failures)
    return [NodeExit(host=host, ended=ended, ended_s=time.monotonic())]


def failure(rank: int, **more: object) -> protocol.Failure:
    facts: dict[str, object] = {"exit_code": 1, "ago_s": 10.0 - rank}
    return protocol.Failure(rank=rank, **(facts | more))  # type: ignore[arg-type]


def test_a_failed_attempt_is_kept_with_the_ranks_that_failed_the_first_in_time_first(
    run: RunFolder,
) -> None:
    evidence.log_failure(run, 2, told(why="so"), ends(failure(1, ago_s=3.0), failure(0, ago_s=8.0)))
    (kept,) = evidence.read_failures(run)
    assert (kept.attempt, kept.finding, kept.ranks) == (2, told(why="so"), (0, 1))


def test_secrets_do_not_get_into_the_folder(run: RunFolder) -> None:
    evidence.log_failure(run, 0, told(SECRET, why=SECRET, fix=SECRET, evidence=SECRET), ends())
    evidence.log_hang(run, told(SECRET), evidence.new_hang(run))
    run_state.log_event(run, "started", words=SECRET, token="x", nested={"password": "y"})
    run_state.EventLog(run).ended("failed", 1, f"the agent failed: {SECRET}")
    for path in run.path.rglob("*.json*"):
        text = path.read_text()
        assert SECRET not in text, path
        assert '"x"' not in text
        assert '"y"' not in text


def test_a_torn_line_costs_that_line_only(run: RunFolder) -> None:
    evidence.log_failure(run, 0, told("first"), ends())
    with (run.events).open("ab") as stream:
        stream.write(b'{"event": "attempt-failed", "at_un')
    evidence.log_failure(run, 2, told("third"), ends())
    with (run.events).open("ab") as stream:
        stream.write(
            b'\xff\xfe\n[]\n{"at_unix_s": 1, "event": "attempt-failed", "attempt": "x"}\n{"attempt": 3'
        )
    assert [one.finding.what for one in evidence.read_failures(run)] == ["first", "third"]


def test_a_run_that_fails_for_ever_does_not_fill_the_disk(run: RunFolder) -> None:
    path = run.path / "lines.jsonl"
    path.write_bytes(b"{}\n" * (run_state._LARGEST_FILE_BYTES // 3 + 2))
    size = path.stat().st_size
    run_state.append_line(path, {"one": "more"})
    run_state.append_line(run.path / "other.jsonl", {"long": "x" * run_state._LONGEST_LINE_BYTES})
    assert path.stat().st_size == size
    assert not (run.path / "other.jsonl").exists()


def test_what_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    nowhere = RunFolder(tmp_path / "nowhere")
    evidence.log_failure(nowhere, 0, told(), ends())
    run_state.log_event(nowhere, "started")
    assert evidence.read_failures(nowhere) == []
    assert run_state.read_events(nowhere) == []
    assert evidence.read_hangs(nowhere) == []


def test_hangs_are_numbered_and_kept_with_what_the_dumps_say(run: RunFolder) -> None:
    call = {"profiling_name": "gloo:barrier", "collective_seq_id": 1, "process_group": ["0", ""]}
    for number in range(11):
        folder = evidence.new_hang(run)
        assert folder is not None
        evidence.log_hang(run, told(f"hang {number}"), folder)
    (folder / "rank-0.flight.json").write_text(json.dumps({"entries": [call]}))
    call["profiling_name"] = "gloo:all_reduce"
    (folder / "rank-10.flight.json").write_text(json.dumps({"entries": [call]}))
    (folder / "rank-2.stacks.txt").write_text("stacks")
    (folder / "rank-x.flight.json").write_text("{")
    kept = evidence.read_hangs(run)
    assert [one.folder and one.folder.name for one in kept] == [
        str(number) for number in range(1, 12)
    ]
    assert [one.name for one in kept[-1].analyse()] == ["collectives-differ"]
    assert [path.name for path in kept[-1].files] == [
        "rank-0.flight.json",
        "rank-2.stacks.txt",
        "rank-10.flight.json",
    ]


def test_a_hang_without_a_folder_has_its_words(run: RunFolder) -> None:
    run_state.log_event(run, run_state.HANG, what="rank 1 keeps the others waiting", folder="../..")
    (kept,) = evidence.read_hangs(run)
    assert (kept.finding.what, kept.files) == ("rank 1 keeps the others waiting", [])


def test_the_event_log_leaves_events(run: RunFolder) -> None:
    event_log = run_state.EventLog(run)
    event_log.phase("joining")
    run_state.log_event(run, "started", attempt=0, ranks=2, hosts=["a 1", "b 1"])
    event_log.ended("failed", 1, "rank 1 failed")
    with (run.events).open("a") as stream:
        stream.write('{"event": "torn"')
    events = run_state.read_events(run)
    assert [one.name for one in events] == ["launched", "joining", "started", "failed"]
    assert events[2].facts == {"attempt": 0, "ranks": 2, "hosts": ["a 1", "b 1"]}
    assert events[3].facts == {
        "what": "failed: rank 1 failed",
        "exit_code": 1,
        "headline": "rank 1 failed",
    }
    assert abs(events[0].at_unix_s - time.time()) < 60
