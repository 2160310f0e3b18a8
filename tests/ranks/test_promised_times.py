"""What is promised in seconds, on this host. Run one by one: ``pytest -m alone -n 0``."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import within
from ranks.launched import WAITING, cpu, launched

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

INSTALLED = Path(sys.executable).parent / "muster"
# Neither a signal to the rank nor one to its group ends the rank's child.
STUBBORN = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("waiting", os.environ["RANK"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "waiting.py").write_text(WAITING)
    (own_machine / "stubborn.py").write_text(STUBBORN)
    return own_machine


@pytest.mark.parametrize(
    "words", [["--help"], ["config", "show"], ["gpus", "--json"]], ids=" ".join
)
def test_a_command_that_only_reads_takes_less_than_a_third_of_a_second(
    words: list[str], machine: Callable[[Scenario], Path]
) -> None:
    machine(scenarios.eight_a100())
    command = [INSTALLED, *words]
    subprocess.run(command, check=True, capture_output=True)  # compiles the modules
    with within(10 * 0.3, f"muster {' '.join(words)}, ten times"):
        for _ in range(10):
            subprocess.run(command, check=True, capture_output=True)


def test_doctor_takes_two_seconds(machine: Callable[[Scenario], Path], muster: Muster) -> None:
    machine(scenarios.eight_a100())
    muster("doctor")
    with within(3 * 2.0, "muster doctor, three times"):
        for _ in range(3):
            muster("doctor")


def test_a_rank_that_sleeps_is_named_while_the_others_wait(own_machine: Path) -> None:
    shutil.copy(Path(__file__).with_name("kinds_of_hang.py"), own_machine / "train.py")
    with launched(own_machine, *cpu("train.py", "--set", "launch.grace=1s"), "forward") as run:
        run.wait_for("now forward at")
        with within(20 + 3, "a hang is named"):  # docs/hangs.md: reported up to 3 s later
            run.wait_for("keeps the others waiting: in time.sleep")
        run.send(signal.SIGINT)
        run.end()


def test_ranks_that_end_when_asked_end_the_run(folder: Path) -> None:
    with launched(folder, *cpu("waiting.py", "--set", "launch.grace=100")) as run:
        run.wait_for("waiting 0", "waiting 1")
        with within(5, "a run is stopped"):
            run.send(signal.SIGTERM)
            run.end()
            run.wait_until_nothing_lives()


def test_ranks_that_ignore_the_end_have_the_grace_and_no_more(folder: Path) -> None:
    with launched(folder, *cpu("stubborn.py", "--set", "launch.grace=2")) as run:
        run.wait_for("waiting 0", "waiting 1")
        with within(2 + 5, "a run whose ranks ignore SIGTERM is stopped"):
            run.send(signal.SIGTERM)
            run.end()
            run.wait_until_nothing_lives()


def test_a_second_interrupt_does_not_wait_for_the_grace(folder: Path) -> None:
    with launched(folder, *cpu("stubborn.py", "--set", "launch.grace=100")) as run:
        run.wait_for("waiting 0", "waiting 1")
        run.send(signal.SIGINT)
        run.wait_for("Ctrl-C")
        with within(5, "a run is killed by a second Ctrl-C"):
            run.send(signal.SIGINT)
            run.end()
            run.wait_until_nothing_lives()


def test_a_killed_launcher_leaves_nothing_after_ten_seconds(folder: Path) -> None:
    with launched(folder, *cpu("stubborn.py", "--set", "launch.grace=5")) as run:
        run.wait_for("waiting 0", "waiting 1")
        with within(10, "the ranks of a killed launcher are gone"):
            run.send(signal.SIGKILL)
            run.end()
            run.wait_until_nothing_lives()
