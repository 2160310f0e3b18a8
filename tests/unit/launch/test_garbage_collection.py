"""What is left of the collector's freeze when Python exits."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, gc, sys
from torchmuster.launch.garbage_collection import freeze_objects

sys.modules.update(dict.fromkeys(sys.argv[1:]))
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # the last to be called
freeze_objects()
print(gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(("modules", "said"), [((), "True True"), (("triton",), "True False")])
def test_objects_stay_frozen_at_exit_unless_triton_is_loaded(
    modules: tuple[str, ...], said: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *modules], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == said.split()
