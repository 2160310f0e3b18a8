"""Which rank is to blame: recorded deaths of torch 2.13, and the orders in which reports can come."""

import json
from pathlib import Path

import pytest

from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.history.root_cause import NodeExit, root_cause_of
from torchmuster.launch.node.memory_evidence import KERNEL_KILLED_IT

LOGS = "runs/x/logs"
CLOSED = (
    "RuntimeError: [/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:914."
)
LATE = "RuntimeError: [/w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"  # fmt: skip
# Two ranks under torchrun, one of them failing in the way of the name; gloo, nothing left out.
RECORDED: dict[str, dict[str, dict[str, object]]] = json.loads(
    (Path(__file__).parent / "torch_2_13_failures.json").read_text(encoding="utf-8")
)


def failure(
    rank: int,
    error: str = "",
    *,
    exit_code: int = 1,
    ago_s: float = 0.0,
    evidence: str = "",
    last_lines: str = "",
) -> protocol.Failure:
    trace = (
        "Traceback (most recent call last):\n"
        + '  File "/home/ann/train.py", line 13, in <module>\n'
    )
    return protocol.Failure(
        rank=rank,
        exit_code=exit_code,
        ago_s=ago_s,
        error=error,
        traceback=f"{trace}{error}\n" if error else "",
        evidence=evidence,
        last_lines=last_lines,
    )


def ended(host: str, *failures: protocol.Failure, at_s: float = 100.0, text: str = "") -> NodeExit:
    message = protocol.Ended(attempt=0, good=not (failures or text), failures=failures, text=text)
    return NodeExit(host=host, ended=message, ended_s=at_s)


def judged(
    *ends: NodeExit,
    noticed_s: float = 100.0,
    world_size: int = 0,
) -> Finding:
    return root_cause_of(ends, noticed_s=noticed_s, logs=LOGS, world_size=world_size)[0]


def test_a_rank_that_had_to_be_killed_after_a_failure_is_not_a_second_failure() -> None:
    first, stubborn = failure(1, "ValueError: no data", ago_s=31.0), failure(0, exit_code=-9)
    polite = failure(2, exit_code=-15, ago_s=30.0)
    message = protocol.Ended(attempt=0, good=False, failures=(first, stubborn, polite), killed=(0,))
    finding = judged(NodeExit(host="a", ended=message, ended_s=100.0))
    assert finding.what.startswith("rank 1 on a failed: ValueError")
    assert "rank 0 did not stop within 30 s" in finding.why
    assert "rank 2 then had to stop" in finding.why


def recorded(name: str, *, ago_s: dict[int, float] | None = None) -> Finding:
    """The verdict on a recorded death; as reported, unless told otherwise, at the same moment."""
    ends = []
    for word, rank in RECORDED[name].items():
        lines = rank["log"]
        code = rank["exit_code"]
        assert isinstance(lines, list)
        assert isinstance(code, int)
        log = "\n".join(lines)
        begin = log.find("Traceback (most recent call last):")
        begin = begin if "Exception Group" not in log else log.find("[rank1]:   + Exception Group")
        traceback = log[begin:].replace(f"[rank{word}]: ", "") if begin >= 0 else ""
        error = traceback.rstrip().rpartition("\n")[2]
        one = protocol.Failure(
            rank=int(word),
            exit_code=code,
            ago_s=(ago_s or {}).get(int(word), 0.0),
            error=error,
            traceback=traceback,
            last_lines=log,
        )
        ends.append(ended("ab"[int(word)], one))
    return judged(*ends, world_size=2)


# By case: the finding's name, who is to blame, and what the fix has in it.
CAUSES = {
    "raise": ("rank-failed", "rank 1 on b", ""),
    "raise-before-init": ("rank-failed", "rank 1 on b", ""),
    "kill-9": ("rank-killed", "rank 1 on b", "journalctl and dmesg on b"),
    "exit-3": ("rank-failed", "rank 1 on b", "its log"),
    "segmentation-fault": ("rank-crashed", "rank 1 on b", "reinstall"),
    "abort": ("rank-crashed", "rank 1 on b", "TORCH_SHOW_CPP_STACKTRACES=1"),
    "sigusr1": ("rank-terminated", "rank 1 on b", "signal.SIGUSR1"),
    "shape-mismatch": ("rank-failed", "rank 1 on b", ""),
    "no-module": ("rank-failed", "rank 1 on b", "python -m pip install nosuchmodule  # on b"),
    "no-cuda": ("rank-failed", "rank 1 on b", "CUDA build of torch"),
    "usage": ("rank-failed", "rank 1 on b", "--help"),
    "no-nccl": ("rank-failed", "all 2 ranks", "init_process_group()"),
    "host-memory": ("rank-failed", "rank 1 on b", "Slurm --mem"),
    "port-taken": ("rank-failed", "rank 0 on a", "ss -ltnp"),
    "message-of-many-lines": ("rank-failed", "rank 1 on b", ""),
    "chained": ("rank-failed", "rank 1 on b", ""),
    "exception-group": ("rank-failed", "rank 1 on b", ""),
    "collective-mismatch": ("rank-crashed", "rank 0 on a", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    "hang": ("rank-failed", "rank 0 on a", ""),
    "no-client": ("rank-failed", "rank 0 on a", ""),
    "store-killed": ("rank-killed", "rank 0 on a", "dmesg on a"),
    "send-to-killed": ("rank-killed", "rank 1 on b", "dmesg on b"),
    "no-interface": ("rank-failed", "rank 1 on b", "unset both"),
}


@pytest.mark.parametrize("case", CAUSES)
def test_recorded_deaths(case: str) -> None:
    name, who, fix = CAUSES[case]
    finding = recorded(case)
    assert (finding.name, finding.status) == (name, Status.FAILURE)
    assert finding.what.startswith(f"{who} ")
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("name", "culprit"), [("raise", 1), ("kill-9", 1), ("store-killed", 0), ("no-interface", 1)]
)
def test_the_cause_is_found_even_if_its_consequence_is_dated_earlier(
    name: str, culprit: int
) -> None:
    finding = recorded(name, ago_s={1 - culprit: 1.5})
    assert finding.what.startswith(f"rank {culprit} on ")
    assert f"rank {1 - culprit} " in finding.why


@pytest.mark.parametrize(
    "name", ["hang", "monitored-barrier", "no-client", "store-wait", "no-store"]
)
def test_where_ranks_only_waited_the_one_that_kept_them_waiting_is_named(name: str) -> None:
    finding = recorded(name)
    ended_rank = next(rank for rank, one in RECORDED[name].items() if one["exit_code"] == -15)
    assert f"rank {ended_rank} " in finding.why


def test_the_evidence_is_the_traceback_and_the_log() -> None:
    finding = recorded("raise")
    assert 't.py", line 13' in finding.evidence
    assert finding.evidence.endswith("\nlog: runs/x/logs/rank-1.log")


@pytest.mark.parametrize(
    "waited",
    [
        "rank 1 waited for work that failed on rank 0: Impossible: CUDA out of memory",
        "rank 0 could not read its data: [Errno 28] No space left on device",
        "the ranks' store became unreachable while waiting for the first rank",
    ],
)
@pytest.mark.parametrize("in_parts", [True, False])
def test_who_only_waited_for_the_rank_that_failed_is_neither_blamed_nor_named(
    waited: str, in_parts: bool
) -> None:
    culprit = protocol.Failure(
        rank=0,
        exit_code=1,
        ago_s=0.0,
        what="there are no files at x",
        why="looked for .txt",
        fix="check the path",
    )
    other = failure(1, f"torchmuster.errors.MusterError: {waited}", ago_s=0.5)
    if in_parts:
        other = protocol.Failure(rank=1, exit_code=1, ago_s=0.5, what=waited, fix="no")
    finding = judged(ended("a", culprit, other), world_size=2)
    assert finding.what.startswith("rank 0 on a ")
    assert finding.what.endswith(f": {culprit.what}")
    assert (finding.why, finding.fix) == ("looked for .txt", "check the path")
    alone = judged(ended("a", other), world_size=2)  # where the culprit left no word
    assert waited in alone.what


OURS = '  File "/work/src/torchmuster/train/step.py", line 7, in step\n    f()\n'
OWN = '  File "/home/ann/data.py", line 7, in __getitem__\n    open(name)\n'
TORCHS = '  File "/env/lib/python3.12/site-packages/torch/x.py", line 3, in g\n    g()\n'
HEAD = "Traceback (most recent call last):\n"


def raised(traceback: str) -> Finding:
    error = traceback.splitlines()[-1]
    return judged(
        ended(
            "a",
            protocol.Failure(rank=0, exit_code=1, ago_s=0.0, error=error, traceback=traceback),
        )
    )


def test_a_traceback_shows_the_users_own_frames_and_never_ours() -> None:
    finding = raised(f"{HEAD}{OURS * 9}{OWN}{TORCHS * 9}{OURS}OSError: cut")
    assert finding.evidence == f"{HEAD}{OWN}OSError: cut\nlog: runs/x/logs/rank-0.log"
    assert finding.why == "raised at /home/ann/data.py:7"


def test_a_traceback_without_frames_of_the_user_shows_the_innermost_ones() -> None:
    finding = raised(f"{HEAD}{OURS * 9}{TORCHS * 9}OSError: cut")
    assert finding.evidence.startswith(f"{HEAD}{TORCHS}{TORCHS}OSError: cut\n")
    assert finding.why == ""


def test_of_exceptions_that_follow_each_other_the_last_is_shown() -> None:
    between = "\nThe above exception was the direct cause of the following exception:\n\n"
    finding = raised(f"{HEAD}{OWN}KeyError: 1\n{between}{HEAD}{OWN}OSError: worse")
    assert finding.evidence.startswith(f"{HEAD}{OWN}OSError: worse\n")


def test_among_causes_the_earliest_counts_however_late_it_was_reported() -> None:
    finding = judged(
        ended("a", failure(0, "KeyError: 'x'", ago_s=0.5), at_s=100.0),
        ended("b", failure(3, "ValueError: no", ago_s=5.0), failure(2, CLOSED), at_s=104.0),
    )
    assert finding.what.startswith("rank 3 on b ")


def test_the_same_error_on_several_ranks_is_told_once() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU {} has"
    ends = [ended("a", *(failure(rank, text.format(2 + rank, rank)) for rank in range(4)))]
    finding = judged(*ends, world_size=8)
    assert finding.what.startswith("rank 0 on a ")
    assert "ranks 1-3 " in finding.why
    assert judged(*ends, world_size=4).what.startswith("all 4 ranks ")


def test_a_kill_by_the_kernel_is_explained() -> None:
    evidence = f"{KERNEL_KILLED_IT}; its peak was 61.0 GiB of the 64.0 GiB this cgroup may use"
    killed = failure(
        1, exit_code=-9, evidence=evidence, last_lines="UserWarning: No module named 'x'"
    )
    finding = judged(ended("b", killed, failure(0, CLOSED, ago_s=1)))
    assert finding.name == "rank-oom-killed"
    assert finding.what.startswith("rank 1 on b ")
    assert evidence in finding.why
    assert "UserWarning" in finding.evidence


def test_ranks_that_were_killed_because_the_run_failed_are_not_to_blame() -> None:
    finding = judged(
        ended("a", failure(0, CLOSED), at_s=100.0),
        ended("b", failure(1, exit_code=-9), failure(2, exit_code=-15), at_s=105.5),
        noticed_s=100.1,
    )
    assert finding.name == "rank-failed"
    assert finding.what.startswith("rank 0 on a ")
    assert "ranks 1-2 " in finding.why


def test_a_kill_that_is_reported_a_little_late_is_still_the_cause() -> None:
    finding = judged(
        ended("a", failure(0, CLOSED), at_s=100.0),
        ended("b", failure(1, exit_code=-9), at_s=101.0),
        noticed_s=100.1,
    )
    assert finding.name == "rank-killed"
    assert finding.what.startswith("rank 1 on b ")


def test_a_kill_by_the_kernel_is_a_cause_even_after_the_end_was_asked_for() -> None:
    finding = judged(
        ended("a", failure(0, CLOSED), at_s=100.0),
        ended("b", failure(1, exit_code=-9, evidence=f"{KERNEL_KILLED_IT}; …"), at_s=109.0),
    )
    assert finding.name == "rank-oom-killed"
    assert finding.what.startswith("rank 1 on b ")


def test_torchrun_s_own_kill_of_a_rank_that_hangs_is_not_the_cause() -> None:
    finding = judged(
        ended("a", failure(0, LATE, ago_s=30.0), failure(1, exit_code=-9)), noticed_s=100.0
    )
    assert finding.name == "rank-failed"
    assert finding.what.startswith("rank 0 on a ")
    assert "rank 1 " in finding.why


def test_a_lost_machine_is_the_cause_of_lost_connections() -> None:
    silent = "no heartbeat for 10 s: the link is down or the host is gone"
    finding = judged(
        ended("a", failure(0, LATE), failure(1, LATE), at_s=95.0),
        NodeExit(host="b", lost=silent, lost_s=100.0),
    )
    assert finding.name == "host-lost"
    assert finding.what.startswith("b ")
    assert finding.what.endswith(silent)
    assert "ranks 0-1 " in finding.why


def test_a_machine_that_is_lost_after_a_rank_failed_is_not_the_cause() -> None:
    finding = judged(
        ended("a", failure(0, "ValueError: no"), at_s=95.0),
        NodeExit(host="b", lost="gone", lost_s=100.0),
    )
    assert finding.name == "rank-failed"
    assert finding.what.startswith("rank 0 on a ")
    assert finding.why.endswith(": gone")


def test_an_agent_that_failed_itself_is_named_with_its_error() -> None:
    words = (
        "the ranks' store exited with code 1\nW UserWarning: Failed to initialize NumPy: No module "
        "named 'numpy'\nTraceback (most recent call last):\nImportError: libcudart.so.12: cannot open"
    )
    finding = judged(ended("a", text=words))
    assert finding.name == "agent-failed"
    assert finding.what.endswith("ImportError: libcudart.so.12: cannot open")
    assert finding.evidence == words


def test_agents_that_were_ended_are_not_to_blame() -> None:
    finding = judged(
        ended("a", text="the ranks were stopped by SIGTERM", at_s=100.2),
        ended("b", text="the ranks' store exited with code -9", at_s=100.0),
        ended("c", text="the ranks' store exited with code -9", at_s=107.0),
    )
    assert finding.name == "agent-failed"
    assert finding.what.startswith("b ")


def test_a_script_s_own_words_are_the_headline() -> None:
    own = protocol.Failure(rank=0, exit_code=1, ago_s=0.0, error="no data in /data")
    words = judged(ended("a", own))
    assert words.what.endswith(": no data in /data")
    number = judged(ended("a", failure(0, exit_code=3)))
    assert number.what.endswith(": exit code 3")


def told(rank: int, what: str, *, ago_s: float = 0.0) -> protocol.Failure:
    return protocol.Failure(
        rank=rank,
        exit_code=1,
        ago_s=ago_s,
        what=what,
        why="parameters 4 GiB\ngradients 4 GiB",
        fix="fsdp",
        last_lines=f"step 1\n{what}",
    )


def test_an_error_in_three_parts_is_the_verdict_as_it_stands() -> None:
    lost = failure(0, "RuntimeError: Connection reset by peer", ago_s=1.0)
    finding = judged(ended("a", lost), ended("b", told(1, "asked for 8 of 2 samples")))
    assert finding.what.startswith("rank 1 on b ")
    assert finding.why.startswith("parameters 4 GiB\ngradients 4 GiB\nrank 0 ")


NCCL_GONE = """torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:268, remote process \
exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer b<40123>"""
NCCL_OLD = """torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, internal \
error, NCCL version 2.14.3
ncclInternalError: Internal check failed.
Last error:
Net : Call to recv from 10.0.0.2<50260> failed : Connection reset by peer"""


@pytest.mark.parametrize(
    "error",
    [
        CLOSED,
        LATE,
        NCCL_GONE,
        NCCL_OLD,
        "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
        "torch.distributed.DistNetworkError: The client socket has timed out after 6000ms while trying",
        "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//never",
        "RuntimeError: [/w/gloo/transport/tcp/pair.cc:80] writev [10.0.0.1]:5: Broken pipe",
        "torch.distributed.DistStoreError: Socket Timeout",
    ],
)
def test_errors_that_speak_of_a_peer_stand_behind_every_cause(error: str) -> None:
    finding = judged(
        ended("a", failure(0, error, ago_s=2)), ended("b", failure(1, exit_code=-11, ago_s=1))
    )
    assert finding.name == "rank-crashed"
    assert finding.what.startswith("rank 1 on b ")


@pytest.mark.parametrize(
    "error",
    [
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 41969, code: -98, name: EADDRINUSE, message: address already in use",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool: Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
)
def test_a_network_error_of_the_script_s_own_is_a_cause(error: str) -> None:
    finding = judged(
        ended("a", failure(0, error, ago_s=2)), ended("b", failure(1, exit_code=-11, ago_s=1))
    )
    assert finding.name == "rank-failed"
    assert finding.what.startswith("rank 0 on a ")


def test_a_timeout_that_aborts_the_process_speaks_of_a_peer_too() -> None:
    watchdog = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 "
        "PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: "
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"
    )
    finding = judged(
        ended("a", failure(3, exit_code=-6, last_lines=watchdog, ago_s=2)),
        ended("b", failure(1, "ValueError: no")),
    )
    assert finding.name == "rank-failed"
    assert finding.what.startswith("rank 1 on b ")
    assert "rank 3 " in finding.why


def test_secrets_and_escapes_of_an_error_are_not_shown() -> None:
    error = "RuntimeError: \x1b[2Jlogin with hf_abcdefghijklmnopqrstuvwx failed"
    finding = judged(ended("a", failure(0, error)))
    assert finding.what.endswith(": login with [redacted] failed")
    assert "hf_abc" not in finding.evidence
    assert "\x1b" not in finding.evidence


def test_a_failure_that_nobody_explains_is_still_a_finding() -> None:
    finding = judged(NodeExit(host="a"))
    assert (finding.name, finding.status) == ("run-failed", Status.FAILURE)
    assert finding.fix.endswith(LOGS)


# ---- hangs, early ends, crashes


HANG = Finding(
    name="rank-elsewhere",
    status=Status.WARNING,
    what="rank 1 on b keeps the others waiting: in time.sleep for 12 s at train.py:88 in step",
    why="its process uses no CPU",
    fix="look at train.py:88",
    evidence="rank 1 on b: time.sleep for 12 s",
)


def after_hang(*ends: NodeExit) -> tuple[Finding, str]:
    return root_cause_of(ends, noticed_s=100.0, logs=LOGS, world_size=2, hang=HANG)


def test_a_hang_that_was_told_is_the_cause_where_others_only_gave_up_waiting() -> None:
    waited = ended("a", failure(0, LATE))
    stuck = ended("b", failure(1, exit_code=-9), at_s=108.0)
    finding, error = after_hang(waited, stuck)
    assert error == HANG.what
    assert (finding.name, finding.what) == (HANG.name, HANG.what)
    assert finding.status is Status.FAILURE
    assert finding.why.startswith(f"{HANG.why}\nrank 0 ")
    assert (finding.fix, finding.evidence) == (HANG.fix, HANG.evidence)


def test_a_hang_that_was_ended_by_us_is_the_cause() -> None:
    finding, _ = after_hang(
        ended("a", failure(0, exit_code=-15), at_s=101.0),
        ended("b", failure(1, exit_code=-9), at_s=108.0),
    )
    assert (finding.name, finding.what, finding.why) == (HANG.name, HANG.what, HANG.why)


def test_a_failure_of_a_rank_s_own_stands_before_a_hang() -> None:
    own = failure(1, "ValueError: no")
    finding, error = after_hang(ended("a", failure(0, CLOSED)), ended("b", own))
    assert finding.name == "rank-failed"
    assert error == "ValueError: no"
    assert finding.what.startswith("rank 1 on b ")


def finished(host: str, *ranks: int) -> NodeExit:
    message = protocol.Ended(attempt=0, good=False, failures=(failure(0, CLOSED),), finished=ranks)
    return NodeExit(host=host, ended=message, ended_s=100.0)


def test_ranks_that_ended_well_while_others_needed_them_are_named() -> None:
    finding = judged(finished("a", 1, 2), world_size=3)
    assert finding.name == "rank-ended-early"
    assert finding.what.startswith("ranks 1-2 ")
    assert f"log: {LOGS}/rank-0.log" in finding.evidence


def test_a_rank_that_ended_well_is_not_blamed_for_another_s_own_failure() -> None:
    message = protocol.Ended(
        attempt=0, good=False, failures=(failure(0, "ValueError: no"),), finished=(1,)
    )
    finding = judged(NodeExit(host="a", ended=message, ended_s=100.0), world_size=2)
    assert finding.name == "rank-failed"
    assert finding.what.startswith("rank 0 on a ")


def test_a_crash_in_native_code_is_told_with_the_line_that_called_it() -> None:
    log = (
        "Fatal Python error: Segmentation fault\n\n"
        "Thread 0x00007f0fda47e6c0 (most recent call first):\n"
        '  File "/home/ann/other.py", line 9 in wait\n\n'
        "Current thread 0x00007f0fdaffdb80 (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
        '  File "/home/ann/train.py", line 4 in step\n'
        '  File "/home/ann/train.py", line 5 in <module>\n\n'
        "Extension modules: torch._C (total: 1)\n"
    )
    finding = judged(ended("a", failure(0, exit_code=-11, last_lines=log)))
    assert finding.name == "rank-crashed"
    assert "/home/ann/train.py:4 in step" in finding.why
    quiet = judged(ended("a", failure(0, exit_code=-11, last_lines="no stack")))
    assert "/home/ann" not in quiet.why
