"""The check ``hosts`` of ``muster selftest`` on two hosts, with and without its planted fault."""

import json

import pytest

from hosts.lab import Lab
from hosts.launching import leftovers, strays
from muster_command import muster_argv


@pytest.mark.parametrize(
    ("flags", "hosts", "verdict"),
    [((), 2, "confirmed"), (("--planted-faults",), 3, "refuted")],
    ids=["healthy", "planted"],
)
def test_two_hosts_are_checked_together(
    lab2: Lab, flags: tuple[str, ...], hosts: int, verdict: str
) -> None:
    work = lab2.folder / "work"
    work.mkdir(exist_ok=True)
    words = ["selftest", "hosts", "--hosts", "node1,node2", "--device", "cpu", "--json", *flags]
    done = lab2.hosts[0].run(muster_argv(words), env={"NO_COLOR": "1"}, cwd=work)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)["checks"]
    assert result["verdict"] == verdict, result
    assert result["figures"]["hosts"] == hosts, result
    assert leftovers(lab2) == {}
    assert strays(lab2) == {}
