"""The trial of torch that ``muster doctor --deep`` makes, with the real torch and with planted faults."""

import os
import sys
from pathlib import Path

import pytest
import torch

from muster_command import Muster
from patience import GIVE_UP_S
from torchmuster.diagnose.machine.torch_at_work import PROBE, Trial, judge_trial, try_torch
from torchmuster.diagnose.probes.torch_at_work import _is_right
from torchmuster.finding import Status

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def trial_of(*before: str) -> Trial:
    """Run the probe after some lines that spoil something."""
    lines = [*before, "import runpy, sys", f"runpy.run_module({PROBE!r}, run_name='__main__')"]
    words = [sys.executable, "-c", "\n".join(lines)]
    return try_torch(words, dict(os.environ), within_s=GIVE_UP_S)


def test_this_machines_torch_works(muster: Muster) -> None:
    done = muster("doctor", "--all", "--deep", "--only", "torch-at-work")
    assert done.code == 0, done.out
    assert done.out.split()[:2] == ["ok", "torch-at-work"]
    assert " imported in " in done.out.splitlines()[0]
    assert "gloo works; cpu " in done.out


def test_wrong_products_are_found() -> None:
    spoil = (
        "import torch",
        "real = torch.mm",
        "def mm(a, b):",
        "    product = real(a, b)",
        "    product[7, 9] += 1",
        "    return product",
        "torch.mm = mm",
    )
    (found,) = judge_trial(trial_of(*spoil), python="python", gpus=False)
    assert (found.name, found.status) == ("device-computes-wrongly", Status.FAILURE)
    assert found.what.startswith("cpu computes wrong values: 1 of ")


def test_an_interface_that_is_not_there_stops_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens5q9")
    found = next(iter(judge_trial(trial_of(), python="python", gpus=False)))
    assert (found.name, found.status) == ("gloo-fails", Status.FAILURE)
    assert "ens5q9" in found.why


def test_one_wrong_value_in_a_quarter_million_is_seen(tmp_path: Path) -> None:
    a, b = (torch.randint(0, 2, (512, 512)).mul(2).sub(1).float() for _ in range(2))
    product = a @ b
    assert _is_right(torch, product, a, b)
    product[300, 401] += 1
    assert not _is_right(torch, product, a, b)
