"""Each kind of hang is named within the seconds that docs/hangs.md gives, whatever library trains; run one by one."""

import contextlib
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from muster_command import Muster
from patience import GIVE_UP_S, within
from ranks.launched import Launched, cpu, launched
from ranks.test_hang_command import under_torchrun
from torchmuster.launch.hangs.detector import (
    BUSY_AFTER_S,
    DIFFERENT_AFTER_S,
    IDLE_AFTER_S,
    STOPPED_AFTER_S,
)

pytestmark = [pytest.mark.ranks, pytest.mark.nightly, pytest.mark.alone, pytest.mark.integrations]

SCRIPT = Path(__file__).with_name("library_scripts") / "kinds_of_hang.py"
# "The report appears two or three seconds later", says docs/hangs.md.
REPORTED_WITHIN_S = 3.0
# What is seen, the limit under muster run, and that of muster hang, which cannot see the numbers of collectives. Under gloo
# the peers of a rank that exits fail at once and do not hang.
KINDS = {
    "stopped": ("has been stopped", STOPPED_AFTER_S, STOPPED_AFTER_S),
    "asleep": ("in time.sleep", IDLE_AFTER_S, IDLE_AFTER_S),
    "different": ("different collectives", DIFFERENT_AFTER_S, IDLE_AFTER_S),
    "busy": ("keeps the others waiting", BUSY_AFTER_S, BUSY_AFTER_S),
}
STYLES = ("plain", "accelerate", "transformers", "lightning")


@contextlib.contextmanager
def hanging(folder: Path, style: str, kind: str) -> Iterator[Launched]:
    shutil.copy(SCRIPT, folder / "train.py")
    words = cpu("train.py", "--set", "launch.grace=1s")
    with launched(folder, *words, style, kind, env={"COLUMNS": "400"}) as command:
        yield command


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_under_muster_is_named_in_time(own_machine: Path, style: str, kind: str) -> None:
    text, limit_s, _ = KINDS[kind]
    with hanging(own_machine, style, kind) as command:
        command.wait_for(f"now {kind} at")
        with within(limit_s + REPORTED_WITHIN_S, f"{style}, {kind} under muster run"):
            command.wait_for(text)
        for rank in psutil.Process(command.process.pid).children(recursive=True):
            if rank.status() == psutil.STATUS_STOPPED:
                rank.resume()
        command.send(signal.SIGINT)
        command.end()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_muster_hang_names_it_in_time(
    own_machine: Path, muster: Muster, style: str, kind: str
) -> None:
    """The times begin when the command has connected: it did not see the ranks before."""
    text, _, limit_s = KINDS[kind]
    with under_torchrun(own_machine, SCRIPT, style, kind) as pid:
        output = own_machine / "output.txt"
        until_s = time.monotonic() + GIVE_UP_S
        while not re.search(f"^now {kind} at", output.read_text(), re.MULTILINE):
            assert time.monotonic() < until_s, output.read_text()
            time.sleep(0.05)
        done = muster("hang", str(pid))
    assert done.code == 1, done
    assert text in done.out
    took = re.search(r"for at least (\d+) s|watched for (\d+) s", done.out)
    assert took is None or int(took[1]) <= limit_s + REPORTED_WITHIN_S
