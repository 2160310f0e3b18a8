"""What ``muster run --hosts`` cannot do it refuses at once: what, why, which host, and what to do.

Nothing is started on any host, and nothing is left there.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from hosts.faults import (
    Fault,
    KeyRefused,
    OnlyOpenPorts,
    PortTaken,
    Undo,
    injected,
)
from hosts.lab import Lab
from hosts.launching import Transcript, leftovers, muster_run, strays
from hosts.namespaces import await_true
from nightly import nightly_except

TRAIN = "print('trained')\n"


@dataclass(frozen=True, kw_only=True)
class Variables:
    """All that starts on a host has these in its environment; ``{lab}`` is the lab's folder."""

    host: str
    variables: dict[str, str]

    def apply(self, lab: Lab) -> Undo:
        host = lab.host(self.host)
        host.set(**{k: v.format(lab=lab.folder) for k, v in self.variables.items()})
        return lambda: host.set(**dict.fromkeys(self.variables))


@dataclass(frozen=True, kw_only=True)
class OtherTorch:
    """Another torch comes first on a host."""

    host: str
    version: str

    def apply(self, lab: Lab) -> Undo:
        known = lab.folder / "other" / f"torch-{self.version}.dist-info"
        known.mkdir(parents=True)
        (known / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {self.version}\n"
        )
        path = {"PYTHONPATH": str(known.parent)}
        return Variables(host=self.host, variables=path).apply(lab)


@dataclass(frozen=True, kw_only=True)
class OtherFiles:
    """On a host the working folder has these files, and no others."""

    host: str
    files: dict[str, str]

    def apply(self, lab: Lab) -> Undo:
        host, folder = lab.host(self.host), lab.folder / "work"
        other = lab.folder / f"work-{self.host}"
        other.mkdir()
        for name, text in self.files.items():
            (other / name).write_text(text)
        host.run(["mount", "--bind", other, folder], check=True)

        def undo() -> None:
            host.run(["umount", folder], check=True)

        return undo


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What is wrong, what is typed, and what is said; ``{lab}`` is the lab's folder."""

    name: str
    faults: Sequence[Fault] = ()
    hosts: str = "node1,node2"
    flags: Sequence[str] = ()
    code: int = 2
    what: str
    why: str
    fix: str


SSH = [
    Refusal(
        name="our key is refused",
        faults=[KeyRefused(host="node2")],
        what="cannot connect to host node2",
        why="it does not accept your key root@10.77.0.12: Permission denied (publickey).",
        fix="ssh-copy-id node2 # for a key with a passphrase also: ssh-add",
    ),
    Refusal(
        name="no torchmuster there",
        flags=["--set", "launch.remote_python=/usr/bin/python3"],
        what="cannot connect to host",
        why="torchmuster is not installed for /usr/bin/python3 there",
        fix="/usr/bin/python3 -m pip install torchmuster",
    ),
]
CODE = [
    Refusal(
        name="another script",
        faults=[OtherFiles(host="node2", files={"train.py": "print('other')\n"})],
        what="train.py or the code next to it on node2 differs from the copy on node1",
        why="ranks that run different code can hang",
        fix="copy {lab}/work from node1 to node2",
    ),
    Refusal(
        name="another torch",
        faults=[OtherTorch(host="node2", version="2.12.0+cpu")],
        what="torch versions differ: {torch} on node1 and 2.12.0 on node2",
        why="different versions may connect and then hang, or compute different results",
        fix="python -m pip install torch=={torch} # on the other hosts",
    ),
]
FIREWALL_FIX = "allow connections on node1: sudo ufw allow 29400/tcp # Ubuntu"
NETWORK = [
    Refusal(
        name="a firewall drops",
        faults=[OnlyOpenPorts(host="node1", ports=(2222,))],
        what="node1 is not reached by node2 on port 29400",
        why="10.77.0.11 (eth0 of node1), node2: no answer in 5 s: a firewall drops the packets or the link is down",
        fix=FIREWALL_FIX,
    ),
    Refusal(
        name="the given port is taken",
        faults=[PortTaken(host="node1", port=29500)],
        flags=["--set", "distributed.master_port=29500"],
        what="port 29500 is in use",
        why="0.0.0.0 29500 (pid",
        fix="omit distributed.master_port to use 29400 or the next free port, or stop that program",
    ),
    Refusal(
        name="an interface that one host lacks",
        faults=[Variables(host="node2", variables={"GLOO_SOCKET_IFNAME": "ens5"})],
        what="node2: GLOO_SOCKET_IFNAME=ens5 cannot work on this host",
        why="ens5 is not the name of an interface that is up and has an address; "
        "gloo would fail with “Unable to find address for: ens5” interfaces here: lo, eth0",
        fix="unset GLOO_SOCKET_IFNAME # Muster then uses the interface that reaches the other hosts",
    ),
]
ALL = [*SSH, *CODE, *NETWORK]


_EACH_CHANGE = (
    "our key is refused",
    "another script",
    "a firewall drops",
    "the given port is taken",
)


@pytest.mark.parametrize(
    "refusal", nightly_except(_EACH_CHANGE, {refusal.name: refusal for refusal in ALL})
)
def test_refused(refusal: Refusal, lab2: Lab) -> None:
    work = lab2.folder / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    words = ["--hosts", refusal.hosts, "--device", "cpu", *refusal.flags, "train.py"]
    with injected(lab2, *refusal.faults):
        said = Transcript(muster_run(lab2.hosts[0], words, work, COLUMNS="1000"))
        code = said.end()
        text = _flat(said.text("err"))
        expected = [
            one.format(lab=lab2.folder, torch=_torch_release())
            for one in (refusal.what, refusal.why, refusal.fix)
        ]
        assert [one for one in expected if one not in text] == [], said.text()
        assert code == refusal.code
        assert "trained" not in said.text()
        assert leftovers(lab2) == {}
        await_true("the node agents have gone", lambda: strays(lab2) == {})


def _flat(text: str) -> str:
    """Take the line breaks out of findings."""
    return re.sub(r"\s+", " ", text)


def _torch_release() -> str:
    told = "import importlib.metadata as m; print(m.version('torch').partition('+')[0])"
    asked = [sys.executable, "-c", told]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
