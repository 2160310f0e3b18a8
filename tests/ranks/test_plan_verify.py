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
    flags = ("--build", "own:model", "--dataset", "own:data", "--global-batch-size", "8")
    where = ("--ranks", "2", "--strategy", "ddp", "--verify", "--json")
    environment = {"XDG_CACHE_HOME": str(own_machine / "cache")}
    done = muster("plan", *flags, *where, env=environment)
    assert done.code == 0, done
    assert "running real steps on this machine" in done.err
    told = json.loads(done.out)
    assert told["chosen"]["candidate"]["strategy"] == "ddp"
    of_memory, of_time = sorted(told["proof"], key=lambda one: one["name"])
    # Activations of 4 samples; how long a step takes depends on who else computes here.
    assert (of_memory["name"], of_memory["status"]) == ("plan-memory", "ok")
    assert re.fullmatch(
        r"tensor memory \(rank [01] of 2\): predicted 2\.5 MiB, measured 2\.5 MiB \([+-]0\.\d %\)",
        of_memory["what"],
    )
    assert of_time["name"] == "plan-time"
    assert of_time["what"].startswith("step time: measured ")
