"""A rank has torchrun's environment, variable by variable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from patience import GIVE_UP_S

pytestmark = pytest.mark.ranks

SCRIPT = """\
import json, os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""
# Variables whose values differ from run to run, with both launchers.
_OF_THE_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
# Deliberate: torchrun gives each rank one thread, we divide the cores among the ranks.
_DIFFERENT = {"OMP_NUM_THREADS"}
_OURS = {"TORCHMUSTER_RUN_TOKEN", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}


def environments(folder: Path, name: str, command: list[str]) -> list[dict[str, str]]:
    """Return the environments of the two ranks that a command starts."""
    (folder / "show.py").write_text(SCRIPT)
    (folder / name).mkdir()
    subprocess.run([*command, "show.py", name], cwd=folder, check=True, timeout=GIVE_UP_S)
    return [json.loads((folder / name / str(rank)).read_text()) for rank in range(2)]


def test_environment_is_that_of_torchrun(
    own_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "0.1")  # torchrun passes its own variables on
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "3"]
    theirs = environments(own_machine, "torchrun", torchrun)
    muster = [sys.executable, "-m", "torchmuster", "run", "--device", "cpu", "--ranks", "2"]
    muster += ["--max-restarts", "3"]
    ours = environments(own_machine, "muster", muster)
    for their, our in zip(theirs, ours, strict=True):
        assert their.keys() & our.keys() >= _OF_THE_RUN
        assert our.keys() - their.keys() == _OURS
        assert their.keys() - our.keys() == set()
        same = their.keys() - _OF_THE_RUN - _DIFFERENT
        assert {name: our[name] for name in same} == {name: their[name] for name in same}
