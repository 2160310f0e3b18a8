"""Every process of a run is found by its token, wherever it went; no other is touched."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from patience import GIVE_UP_S
from torchmuster.launch.node import process_cleanup

# A process that starts another one in a session of its own and does not wait for it.
STARTS_A_GRANDCHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
                 start_new_session=True)
sys.stdin.read()
"""


@pytest.fixture
def token() -> Iterator[str]:
    name = os.urandom(8).hex()
    yield name
    process_cleanup.kill_processes(name, within_s=GIVE_UP_S)


def started(token: str, program: str = "print(flush=True); input()") -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, process_cleanup.TOKEN_VARIABLE: token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()  # it, or its grandchild, is there
    return process


def ended(process: "subprocess.Popen[bytes]") -> int:
    code = process.wait(GIVE_UP_S)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    return code


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_grandchild_in_a_session_of_its_own_is_found_and_ended(token: str) -> None:
    child = started(token, STARTS_A_GRANDCHILD)
    found = {one.pid: one for one in process_cleanup.processes_of(token)}
    assert child.pid in found
    (grandchild,) = (one for pid, one in found.items() if pid != child.pid)
    assert os.getsid(grandchild.pid) == grandchild.pid
    child.kill()
    ended(child)
    assert [one.pid for one in process_cleanup.processes_of(token)] == [grandchild.pid]
    assert process_cleanup.kill_processes(token, within_s=GIVE_UP_S) == []
    deadline = time.monotonic() + GIVE_UP_S
    while not has_ended(grandchild):  # one that is about to end has no environment any more
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_agent_s_part_leaves_the_other_s_alone(token: str) -> None:
    first, second, tenth = started(f"{token}.1"), started(f"{token}.2"), started(f"{token}.10")
    assert process_cleanup.kill_processes(f"{token}.1", within_s=GIVE_UP_S) == []
    assert ended(first) == -9
    assert {one.pid for one in process_cleanup.processes_of(token)} == {second.pid, tenth.pid}
    # The whole run's token finds every part.
    assert process_cleanup.kill_processes(token, within_s=GIVE_UP_S) == []
    assert (ended(second), ended(tenth)) == (-9, -9)


def test_whoever_sweeps_does_not_end_itself(token: str) -> None:
    program = (
        "import os, sys; from torchmuster.launch.node import process_cleanup\n"
        f"token = os.environ[{process_cleanup.TOKEN_VARIABLE!r}]\n"
        "print(process_cleanup.kill_processes(token, within_s=2), process_cleanup.processes_of(token))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, process_cleanup.TOKEN_VARIABLE: token},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[] []\n"


def test_a_process_that_keeps_starting_others_is_ended_with_all_of_them(token: str) -> None:
    program = (
        "import subprocess, sys, time\nprint(flush=True)\n"
        "while True:\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    time.sleep(0.05)\n"
    )
    process = started(token, program)
    time.sleep(0.2)
    assert process_cleanup.kill_processes(token, within_s=GIVE_UP_S) == []
    assert ended(process) == -9
    assert process_cleanup.processes_of(token) == []
