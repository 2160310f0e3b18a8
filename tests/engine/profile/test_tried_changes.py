"""Changes that are tried from inside a training's process."""

import subprocess
import sys

import pytest

from patience import GIVE_UP_S

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]
pytest.importorskip("torch")

_IN_16_BITS = """
import torch
from torchmuster.profile.probes.changes import AppliedChange
from torchmuster.profile.facts import Change

changes = AppliedChange(Change(kind="bf16"))
changes.install()
one = torch.ones(4, 4)
print((one @ one).dtype)
with torch.autocast("cpu", enabled=False):
    print((one @ one).dtype)
with torch.autocast("cpu", torch.float16, enabled=False):
    print((one @ one).dtype)
print(changes.used)
"""


def test_products_are_tried_in_16_bits_also_where_the_script_says_not_to() -> None:
    """Many scripts have ``autocast(..., enabled=use_amp)`` around their forward."""
    ran = subprocess.run(
        [sys.executable, "-c", _IN_16_BITS],
        capture_output=True,
        text=True,
        check=True,
        timeout=GIVE_UP_S,
    )
    assert ran.stdout.split() == ["torch.bfloat16"] * 3 + ["True"]
