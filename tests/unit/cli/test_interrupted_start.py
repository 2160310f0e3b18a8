"""Ctrl-C while the command is still importing its modules."""

import signal
import subprocess
import sys

SLOW_IMPORT = """
import os, signal, sys
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "torchmuster.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Slow())
from torchmuster.__main__ import main
main()
"""


def test_ctrl_c_during_the_imports_shows_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW_IMPORT], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""
