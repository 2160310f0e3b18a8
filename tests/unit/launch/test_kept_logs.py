"""Logs that stay on their hosts: what is sent of them, and how the rest is fetched."""

import tempfile
import threading
import time
from pathlib import Path

import pytest

from torchmuster.cli import logs
from torchmuster.errors import Impossible, NotNow
from torchmuster.launch.history import host_logs, run_state
from torchmuster.launch.history.host_logs import HostLogs
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.session import logs_stay
from torchmuster.launch.node.kept_logs import FirstError, end_of_log, kept_folder
from torchmuster.runfolder import RunFolder, create_run_folder

TRACE = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise RuntimeError("no data")
RuntimeError: no data
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run_folder(tmp_path / "runs", "big")
    hosts = [HostLogs(host=f"n{at}", first_rank=8 * at, ranks=8, folder="/logs") for at in range(2)]
    host_logs.write_hosts(run, hosts)
    return run


def test_only_the_first_error_of_a_host_is_sent() -> None:
    errors = FirstError()
    assert errors.look(1, "step 1 loss 2.0\n" * 100) == ""
    assert errors.look(2, f"step 2\n{TRACE}") == TRACE
    assert errors.look(1, TRACE) == ""  # the same error on the next rank
    assert errors.look(2, "more of it\n") == "more of it\n"
    assert len(errors.look(2, "x\n" * 100).splitlines()) == 40 - 5
    assert errors.look(2, "y\n") == ""


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]: Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "node7:123:456 [0] NCCL WARN Call to connect failed",
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'c10::Error'",
    ],
)
def test_errors_are_recognized(line: str) -> None:
    assert FirstError().look(1, f"step 1\n{line}\n") == f"{line}\n"


@pytest.mark.parametrize("line", ["loss 2.3, error 0.1", "val_error: 0.4", "0 errors found"])
def test_other_lines_are_not_errors(line: str) -> None:
    assert FirstError().look(1, f"{line}\n") == ""


def test_the_end_of_a_log_begins_with_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "rank-3.log").write_text("".join(f"line {at}\n" for at in range(1000)))
    log = end_of_log(tmp_path, 3, 100)
    assert log.size_bytes == (tmp_path / "rank-3.log").stat().st_size
    assert log.text.startswith("line ")
    assert log.text.endswith("line 999\n")
    assert len(log.text) <= 100
    assert end_of_log(tmp_path, 4, 100).problem


def test_the_folder_is_private_and_a_run_id_cannot_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = kept_folder("20261118-run-1")
    assert folder.parent.parent == tmp_path
    assert folder.parent.stat().st_mode & 0o077 == 0
    for name in ("../x", "a/b", "", ".hidden"):
        with pytest.raises(Impossible):
            kept_folder(name)


@pytest.mark.parametrize(
    ("asked", "hosts", "stay"),
    [(None, 64, False), (None, 65, True), (True, 2, True), (False, 500, False), (True, 1, False)],
)
def test_logs_stay_with_many_hosts_or_if_requested(
    asked: bool | None, hosts: int, stay: bool
) -> None:
    spec = JobSpec(name="n", command=("t.py",), folder="/", keep_logs=asked)
    decision = logs_stay(spec, hosts)
    assert decision.value is stay
    assert decision.reason


def test_a_log_is_fetched_from_its_host(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = run_state.RunState(phase="running", since_unix_s=1.0, started_unix_s=1.0)
    monkeypatch.setattr(run_state, "read_state", lambda run: state)

    def launcher() -> None:
        while not (ranks := host_logs.requested_ranks(run)):
            time.sleep(0.01)
        for rank in ranks:
            host_logs.write_fetched(run, rank, f"hello from rank {rank}\n\x1b[2Jend\n")

    thread = threading.Thread(target=launcher)
    thread.start()
    logs.show_log(run, 13)
    thread.join()
    printed = capsys.readouterr()
    assert printed.out == "hello from rank 13\nend\n"
    assert "n1:/logs/rank-13.log" in printed.err
    assert not host_logs.requested_ranks(run)


def test_after_the_run_the_place_of_the_log_is_named(run: RunFolder) -> None:
    with pytest.raises(NotNow) as error:
        logs.show_log(run, 3)
    assert error.value.fix == "ssh n0 tail -n 100 /logs/rank-3.log"


def test_logs_in_the_run_folder_are_shown_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run_folder(tmp_path / "runs", "small")
    (run.logs / "rank-1.log").write_text("one\ntwo\n")
    assert logs.show_log(run, 1) == len("one\ntwo\n")
    assert capsys.readouterr().out == "one\ntwo\n"
    with pytest.raises(Impossible):
        logs.show_log(run, 2)
