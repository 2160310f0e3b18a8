"""``muster plan --verify``: what a plan says of a model of the user's is what its real steps take."""

import json
import re
from pathlib import Path

import pytest

from muster_command import Muster
from own_training import write_model

pytestmark = pytest.mark.ranks


def test_real_steps_take_what_was_planned(muster: Muster, own_machine: Path) -> None:
    write_model(own_machine)
    model = ("--set", "model.build=own:model", "--set", "data.dataset=own:data")
    flags = ("--global-batch-size", "8", "--ranks", "2", "--strategy", "ddp", "--verify", "--json")
    done = muster("plan", *model, *flags)
    assert done.code == 0, done
    assert "running real steps on this machine" in done.err
    told = json.loads(done.out)
    assert told["chosen"]["value"]["candidate"]["strategy"] == "ddp"
    (finding,) = told["proof"]
    # Activations of 4 samples; how long a step takes depends on who else computes here.
    assert (finding["name"], finding["status"]) == ("plan-verified", "ok")
    assert re.match(
        r"tensors: predicted 2\.5 MiB, measured 2\.5 MiB \([+-]0\.\d %\); step: measured ",
        finding["what"],
    )
