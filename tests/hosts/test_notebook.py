"""Cells on ranks of two machines, called by ssh or joined by a code; the kernel is on the first."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hosts.conftest import MakeLab
from hosts.host import Host
from hosts.lab import Lab
from hosts.launching import Transcript, leftovers
from hosts.namespaces import await_true
from muster_command import muster_argv
from patience import GIVE_UP_S

pytestmark = pytest.mark.nightly

# What a kernel does with cells, without the kernel.
PROGRAM = """\
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()

def cell(text):
    ran = shell.run_cell(text, store_history=True)
    sys.stdout.flush()
    ran.raise_error()

cell("%load_ext torchmuster")
cell("%muster start --ranks 1 --device cpu " + " ".join(sys.argv[1:]))
cell("%%ranks\\nimport os, socket, torch, torch.distributed as dist\\ndist.init_process_group('gloo')")
cell("%%ranks\\nx = torch.ones(1) * (rank + 1)\\ndist.all_reduce(x)\\nx.item(), os.uname().nodename")
cell("%muster pull x")
cell("print('pulled', x)")
cell("%muster status")
cell("%muster stop")
print("all done", flush=True)
"""


def begin(host: Host, folder: Path, *words: str) -> Transcript:
    (folder / "program.py").write_text(PROGRAM)
    process = host.popen(
        [sys.executable, "program.py", *words],
        cwd=folder,
        env={"NO_COLOR": "1", "IPYTHONDIR": str(folder / "ipython")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return Transcript(process)


def see_both_machines(told: Transcript, lab: Lab) -> None:
    code = told.end()
    out = told.text("out")
    assert "all done" in out, out + told.text("err")
    assert "[rank 0] (3.0, 'node1')" in out
    assert "[rank 1] (3.0, 'node2')" in out
    assert "pulled [tensor([3.]), tensor([3.])]" in out
    assert "refused" not in out
    assert code == 0
    assert leftovers(lab) == {}


def test_by_ssh(lab2: Lab, tmp_path: Path) -> None:
    see_both_machines(begin(lab2.hosts[0], tmp_path, "--hosts", "node1,node2"), lab2)


def test_by_a_code(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(2, ssh=False)
    told = begin(lab.hosts[0], tmp_path, "--nnodes", "2")
    await_true("the code", lambda: "muster join" in told.text("err"))
    found = re.search(r"muster join --trust-host (\S+)", told.text("err"))
    assert found is not None
    guest = lab.hosts[1].popen(
        muster_argv(["join", "--trust-host", found[1]]),
        cwd=tmp_path,
        env={"NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    joined = Transcript(guest)
    see_both_machines(told, lab)
    assert joined.process.wait(GIVE_UP_S) in (0, 1)
