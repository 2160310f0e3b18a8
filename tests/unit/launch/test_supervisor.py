"""The supervisor of a node agent: nothing that the node agent started outlives it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from patience import GIVE_UP_S
from torchmuster.launch.node import supervisor

# A node agent that starts a process in another session, with an empty environment, whose parent exits.
AGENT = """\
import os, sys, time
from pathlib import Path
from torchmuster.launch.node import supervisor
folder = Path(sys.argv[1])
supervisor.serve_below()
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    grandchild = os.fork()
    if grandchild == 0:
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os.write(writing, str(grandchild).encode())
    os._exit(0)
grandchild = os.read(reading, 20).decode()
(folder / "new").write_text(f"{os.getpid()} {grandchild} " + os.environ[supervisor.FOLDER_VARIABLE])
(folder / "new").rename(folder / "pids")
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator["Supervised"]:
    started = Supervised(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()


class Supervised:
    """A supervisor, its node agent and what that started."""

    def __init__(self, folder: Path) -> None:
        code = "import sys; from torchmuster.launch.node import supervisor; "
        code += f"sys.exit(supervisor.supervise([sys.executable, '-c', {AGENT!r}, *sys.argv[1:]]))"
        command = [sys.executable, "-c", code, str(folder), "600"]
        self.process = subprocess.Popen(command, start_new_session=True)
        until_s = time.monotonic() + GIVE_UP_S
        while not (folder / "pids").exists():
            assert time.monotonic() < until_s
            time.sleep(0.01)
        agent, grandchild, node_folder = (folder / "pids").read_text().split()
        self.agent, self.grandchild = psutil.Process(int(agent)), psutil.Process(int(grandchild))
        self.folder = Path(node_folder)


def is_gone(process: psutil.Process) -> bool:
    """Return whether a process ends."""
    try:
        process.wait(GIVE_UP_S)
    except psutil.TimeoutExpired:
        return False
    return True


def test_nothing_survives_sigkill_of_the_node_agent(supervised: Supervised) -> None:
    assert supervised.folder.is_dir()
    supervised.agent.kill()
    assert supervised.process.wait(GIVE_UP_S) == 128 + signal.SIGKILL
    assert not supervised.grandchild.is_running()
    assert not supervised.folder.exists()


def test_node_agent_ends_with_its_supervisor(supervised: Supervised) -> None:
    supervised.process.kill()
    assert is_gone(supervised.agent)
    supervised.grandchild.kill()  # nobody is left who knows it


def test_request_to_stop_reaches_the_node_agent(supervised: Supervised) -> None:
    supervised.process.terminate()
    assert supervised.process.wait(GIVE_UP_S) == 128 + signal.SIGTERM
    assert not supervised.grandchild.is_running()


def test_exit_code_is_that_of_the_node_agent() -> None:
    assert supervisor_code("import sys; sys.exit(7)") == 7


def supervisor_code(agent: str) -> int:
    code = "import sys; from torchmuster.launch.node import supervisor; "
    code += f"sys.exit(supervisor.supervise([sys.executable, '-c', {agent!r}]))"
    return subprocess.run([sys.executable, "-c", code], timeout=GIVE_UP_S).returncode


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_descendants_are_found_below_their_parents(supervised: Supervised) -> None:
    below = supervisor.descendants(supervised.process.pid)
    living = {process.pid for process in below if process.state != "Z"}
    assert living == {supervised.agent.pid, supervised.grandchild.pid}
