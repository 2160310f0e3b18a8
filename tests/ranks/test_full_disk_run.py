"""A real run whose folder is on a disk that is full for a while: it goes on, says so, and its lines are all there."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster_command import Muster
from patience import GIVE_UP_S
from ranks.held_model import held_model
from ranks.launched import Launched, launched

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root"),
    pytest.mark.nightly,
]

STEPS = 600
OWN = """\
import os, time, torch
from torch import nn

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, row):
        time.sleep(0.005)
        with open("rows-read", "a") as stream:  # on another disk
            stream.write(".")
        return torch.full((4,), row / 4000), row % 3

def data():
    return Rows()
""" + held_model((40, "is-full"), (200, "has-room"))
CONFIG = f"""\
model: {{build: "own:held"}}
data: {{dataset: "own:data"}}
train: {{steps: {STEPS}, log_every: 1, micro_batch_size: 4}}
checkpoint: {{every: 1h}}
metrics: {{sinks: [tensorboard]}}
"""


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("this container may not mount file systems")
    try:
        yield
    finally:
        # At once, also where a process of a test that failed has a file open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass


def _await_rows(folder: Path, more: int) -> None:
    """Wait until the ranks have read so many rows more: no file on the full disk could tell."""
    path = folder / "rows-read"
    wanted, deadline = path.stat().st_size + more, time.monotonic() + GIVE_UP_S
    while path.stat().st_size < wanted:
        assert time.monotonic() < deadline, "the ranks stand still"
        time.sleep(0.05)


def _whole_lines(run: Launched) -> list[str]:
    """Return the lines that are whole: the last one may have found room for a part of it."""
    text = (run.run.metrics / "steps.jsonl").read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def test_a_disk_that_is_full_for_a_while(own_machine: Path, muster: Muster) -> None:
    pytest.importorskip("tensorboard")
    (own_machine / "own.py").write_text(OWN)
    (own_machine / "config.yaml").write_text(CONFIG)
    runs = own_machine / "runs"
    words = ("train", "--config", "config.yaml", "--device", "cpu", "--ranks", "2")
    with _small_disk(runs), launched(own_machine, *words, "--max-restarts", "0") as run:
        run.wait_for("step 5/")
        _fill(runs / "filler")
        (own_machine / "is-full").touch()
        written = _whole_lines(run)
        assert [json.loads(one)["step"] for one in written] == list(range(1, len(written) + 1))
        _await_rows(own_machine, 2 * 4 * 30)
        assert _whole_lines(run)[: len(written)] == written, "what was written stays"
        served = muster("exporter", "--once").out
        assert re.search(r"^muster_host_disk_free_bytes\{.*\} 0\.0$", served, re.MULTILINE)
        (runs / "filler").unlink()
        (own_machine / "has-room").touch()
        result = run.end()
        run.wait_until_nothing_lives()
        assert result.code == 0, run
        log = run.run.rank_log(0).read_text()
        assert log.count("training continues without these lines") == 1
        assert f'"step":{STEPS},' in (run.run.metrics / "steps.jsonl").read_text()


FULL_AT_THE_END = """\
import os, time, torch
from torch import nn

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, row):
        return torch.full((4,), row / 64), row % 3

def data():
    return Rows()

""" + held_model((8, "is-full"))
CONFIG_AT_THE_END = """\
model: {build: "own:held"}
data: {dataset: "own:data"}
train: {steps: 10, log_every: 1, micro_batch_size: 4}
checkpoint: {every: 6}
"""


def test_a_final_save_that_fails_ends_the_run_with_an_error(own_machine: Path) -> None:
    (own_machine / "own.py").write_text(FULL_AT_THE_END)
    (own_machine / "config.yaml").write_text(CONFIG_AT_THE_END)
    runs = own_machine / "runs"
    words = ("train", "--config", "config.yaml", "--device", "cpu", "--ranks", "2")
    with _small_disk(runs), launched(own_machine, *words, "--max-restarts", "0") as run:
        run.wait_for("step 7/")  # the line of a step follows in the next one
        _fill(runs / "filler")
        (own_machine / "is-full").touch()
        run.wait_for("the final state, step 10, could not be saved")
        result = run.end()
        run.wait_until_nothing_lives()
        assert result.code != 0, run
        assert not (run.run.checkpoints / "final").exists()
