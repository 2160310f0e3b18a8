"""The trial of torch that ``muster doctor --deep`` makes, with the real torch and with planted faults."""

import os
import sys

import pytest

from muster_command import Muster
from patience import GIVE_UP_S
from torchmuster.diagnose.machine.torch_at_work import PROBE, Trial, judge_trial, try_torch
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
        "real = torch.matmul",
        "def matmul(a, b):",
        "    product = real(a, b)",
        "    if product.is_floating_point():",
        "        product[7, 9] += 1",
        "    return product",
        "torch.matmul = matmul",
    )
    (found,) = judge_trial(trial_of(*spoil), python="python", gpus=False)
    assert (found.name, found.status) == ("device-computes-wrongly", Status.FAILURE)
    assert found.what.startswith("cpu computes wrong values: ")


def test_an_interface_that_is_not_there_stops_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens5q9")
    found = next(iter(judge_trial(trial_of(), python="python", gpus=False)))
    assert (found.name, found.status) == ("gloo-fails", Status.FAILURE)
    assert "ens5q9" in found.why
