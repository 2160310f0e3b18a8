"""Cells on ranks, in a real Jupyter kernel: output, values, errors, interrupts, hangs and ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from patience import GIVE_UP_S
from ranks.launched import said_by, wait_until_nothing_lives
from ranks.notebook_kernel import Kernel, running_kernel
from torchmuster.runfolder import list_runs

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

GROUP = "%%ranks\nimport time, torch, torch.distributed as dist\ndist.init_process_group('gloo')"
# For ranks that are to fail at nearly the same time: else the first error is shown while the other still runs.
MEET = """\
%%ranks
import os, time
def meet(name):
    open(f"{name}-{rank}", "w").close()
    while not all(os.path.exists(f"{name}-{one}") for one in range(world_size)):
        time.sleep(0.01)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with running_kernel(tmp_path) as one:
        one.run_well("%load_ext torchmuster")
        yield one


@pytest.fixture
def with_ranks(kernel: Kernel) -> Kernel:
    kernel.run_well("%muster start --ranks 2 --device cpu")
    return kernel


def test_cells_run_on_ranks_and_what_is_alike_is_shown_once(
    with_ranks: Kernel, tmp_path: Path
) -> None:
    kernel = with_ranks
    text = kernel.run_well("%%ranks\nprint('hello')\nprint('I am', rank)\n[world_size]")
    assert [said_by(rank, text) for rank in (0, 1)] == [
        ["hello", "I am 0", "[2]"],
        ["hello", "I am 1", "[2]"],
    ]
    assert text.splitlines()[-1] == "[all 2 ranks] [2]"  # whenever they had it
    # Names stay; a semicolon hides the value; what is not Python's writes arrives as well.
    kernel.run_well("%%rank 1\nmine = rank + 41;")
    assert kernel.run_well("%%rank 1\nmine") == "[rank 1] 42\n"
    seen = tmp_path / "seen"
    kernel.begin(
        "%%ranks\nimport os, time\nos.system(f'echo native {rank}')\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.05)"
    )
    kernel.wait_for("native 0")  # by way of the logs, which may take longer than a cell
    kernel.wait_for("native 1")
    seen.touch()
    done = kernel.finish()
    assert sorted(done.text.splitlines()) == ["[rank 0] native 0", "[rank 1] native 1"]
    _the_key_is_nowhere(kernel, tmp_path)
    _errors_are_shortened_to_the_cell(kernel)
    _words_that_are_wrong_are_told(kernel)
    kernel.run_well("%muster stop")
    assert _children(kernel) == []
    assert "%muster restart" in kernel.run("%%ranks\n1").error


def _children(kernel: Kernel) -> list[psutil.Process]:
    found = []
    for one in kernel.process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def _the_key_is_nowhere(kernel: Kernel, folder: Path) -> None:
    program = "%%ranks\nimport os\n'TORCHMUSTER_NOTEBOOK_SECRET' in os.environ"
    assert kernel.run_well(program) == "[all 2 ranks] False\n"
    (run,) = list_runs(folder / "runs")
    assert '"TORCHMUSTER_NOTEBOOK_SECRET": "[redacted]"' in run.job.read_text()
    # Nothing listens any more once all ranks are there.
    assert not [
        one for one in _children(kernel)[0].net_connections() if one.status == psutil.CONN_LISTEN
    ]


def _errors_are_shortened_to_the_cell(kernel: Kernel) -> None:
    kernel.run_well(MEET)
    error = kernel.run("%%ranks\ndef f():\n    return 1 / rank\nmeet('f')\nf()").error
    assert error.startswith("[rank 0]\nTraceback")
    assert error.endswith("ZeroDivisionError: division by zero")
    assert "torchmuster" not in error
    assert "    return 1 / rank" in error
    assert 'File "cell-' in error
    both = kernel.run("%%ranks\nmeet('exit')\nraise SystemExit(3)").error
    assert both.startswith("[all 2 ranks]\n")
    assert both.count("SystemExit: 3") == 1
    assert kernel.run("%%ranks\n1 +").error.endswith("SyntaxError: invalid syntax")


def _words_that_are_wrong_are_told(kernel: Kernel) -> None:
    assert "2 ranks already running" in kernel.run("%muster start").error
    assert "there is no rank 5" in kernel.run("%%rank 5\n1").error
    assert "%%rank 0  # for some ranks" in kernel.run("%%ranks 0\n1").error
    assert "'x' is not a rank" in kernel.run("%%rank x\n1").error
    assert "'strat' is not an action" in kernel.run("%muster strat").error


@pytest.mark.nightly
def test_a_cell_of_python_is_interrupted_and_names_stay(with_ranks: Kernel) -> None:
    kernel = with_ranks
    kernel.run_well("%%ranks\nimport time\nkept = 7")
    kernel.begin("%%ranks\nwhile True:\n    time.sleep(0.1)")
    kernel.wait_for("ranks 0-1: in time.sleep at cell-4:2")
    kernel.interrupt()
    error = kernel.finish().error
    assert error.startswith("[all 2 ranks]\nTraceback")
    assert error.endswith("KeyboardInterrupt")
    assert "rank_loop" not in error
    assert kernel.run_well("%%ranks\nkept") == "[all 2 ranks] 7\n"


@pytest.mark.nightly
def test_a_hang_is_named_and_its_interrupt_gives_new_ranks(with_ranks: Kernel) -> None:
    kernel = with_ranks
    kernel.run_well(GROUP)
    kernel.begin(
        "%%ranks\nif rank == 1:\n    time.sleep(300)\nx = torch.ones(1)\ndist.all_reduce(x)"
    )
    kernel.wait_for("rank 0: waiting in all_reduce at cell-4:4; rank 1: in time.sleep at cell-4:2")
    kernel.wait_for("rank 1 on")
    kernel.wait_for("keeps the others waiting: in time.sleep")
    kernel.interrupt()
    kernel.wait_for("Ctrl-C again")  # rank 0 does not return: nothing is lost before the second one
    kernel.interrupt()
    done = kernel.finish()
    assert "not all ranks returned: rank 0: waiting in all_reduce at cell-4:4" in done.error
    assert "their variables are lost" in done.error
    # The new ones are whole.
    assert kernel.run_well(f"{GROUP}\nx = torch.ones(1)\ndist.all_reduce(x)\nx") == (
        "[all 2 ranks] tensor([2.])\n"
    )


@pytest.mark.nightly
def test_a_failure_is_shown_while_the_others_wait_in_vain(with_ranks: Kernel) -> None:
    kernel = with_ranks
    kernel.run_well(GROUP)
    kernel.begin("%%ranks\nassert rank == 0, 'no data'\ndist.barrier()")
    kernel.wait_for("AssertionError: no data")
    kernel.wait_for("rank 0: waiting in barrier at cell-4:2; rank 1: finished")
    kernel.interrupt()
    kernel.wait_for("Ctrl-C again")
    kernel.interrupt()
    error = kernel.finish().error
    assert error.startswith(
        "rank 1 failed, as shown above\ninterrupted, but not all ranks returned: rank 0: waiting in barrier"
    )
    assert "their variables are lost" in error


@pytest.mark.nightly
def test_a_rank_that_dies_is_told_and_started_again(with_ranks: Kernel, tmp_path: Path) -> None:
    kernel = with_ranks
    error = kernel.run("%%ranks\nimport os, time\nif rank == 1: os._exit(9)\ntime.sleep(300)").error
    assert "rank 1" in error
    assert "9" in error
    assert "%muster restart" in error
    kernel.run_well("%muster restart")
    assert kernel.run_well("%%ranks\n'here'") == "[all 2 ranks] 'here'\n"
    # One that dies between two cells.
    over = tmp_path / "the cell is over"
    kernel.run_well(
        "%%rank 0\nimport os, threading, time\n"
        f"def die():\n    while not os.path.exists({str(over)!r}): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), 9)\n"
        "threading.Thread(target=die, daemon=True).start()"
    )
    over.touch()
    wait_until_childless(kernel)
    error = kernel.run("%%ranks\nrank").error
    assert "rank 0" in error
    assert "SIGKILL" in error


def wait_until_childless(kernel: Kernel) -> None:
    """Wait until a kernel has no children."""
    psutil.wait_procs(_children(kernel), timeout=GIVE_UP_S)
    assert _children(kernel) == []


@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_nothing_is_left_of_a_kernel_that_is_killed(with_ranks: Kernel, busy: bool) -> None:
    kernel = with_ranks
    if busy:
        kernel.begin("%%ranks\nimport time\nprint('there')\ntime.sleep(600)")
        kernel.wait_for("there")
    assert len(_children(kernel)) >= 4  # the launcher, the node agent, the agent, the ranks
    kernel.kill()
    wait_until_nothing_lives(kernel.mark)
