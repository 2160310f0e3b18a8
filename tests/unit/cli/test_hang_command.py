"""``muster hang``: which job is meant, and what it says where there is none."""

import os
import re
from pathlib import Path

import pytest

from muster_command import Muster
from unit.diagnose.hang.plain_ranks import started

pytestmark = pytest.mark.slow

SLEEPS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"


def test_of_several_jobs_one_must_be_given(own_machine: Path, muster: Muster) -> None:
    script = own_machine / "train.py"
    script.write_text(SLEEPS)
    with started(script, port=41021) as (_, pid), started(script, port=41022):
        several = muster("hang")
        assert several.code == 2
        listed = re.findall(
            r"muster hang (127.0.0.1:4102\d)   # 1 of 2 ranks on .*train.py", several.err
        )
        assert listed == ["127.0.0.1:41021", "127.0.0.1:41022"], several.err
        both = muster("hang", "127.0.0.1:4102")
        assert both.code == 2
        assert "127.0.0.1:4102 does not name one of 2 jobs" in both.err
        # Rank 1 was never started: the rank that is there waits for nobody.
        one = muster("hang", str(pid), "--within", "2s")
        assert one.code == 0, one
        assert one.out.startswith("job 127.0.0.1:41021: 1 of 2 ranks on ")
        assert "time.sleep at train.py:3 (idle)   > time.sleep(600)" in one.out


def test_a_process_that_is_no_rank(muster: Muster) -> None:
    done = muster("hang", str(os.getpid()))
    assert done.code == 2
    # Other tests may run jobs meanwhile.
    assert re.search(r"there are no ranks of a distributed job|does not name one of", done.err)
    assert muster("hang", "999999999").code == 2
