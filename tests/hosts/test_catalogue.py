"""Every fault of the catalogue is made for real, named as itself, and mended by what the finding says."""

import os
from pathlib import Path

import pytest

from hosts.catalogue import ALL, Catalogued
from hosts.checking import Found, check, do_what_it_says, names
from hosts.conftest import MakeLab
from hosts.faults import injected
from hosts.lab import Lab
from nightly import nightly_except

_EACH_CHANGE = (
    "the second host's firewall drops the ports of ranks",
    "a clock that is a minute behind",
    "a GPU has fallen off the bus",
)
# One of each family of faults runs every night; all of them with EVERY_FAULT=1.
_EACH_NIGHT = (
    *_EACH_CHANGE,
    "the first host's firewall drops the rendezvous port",
    "only ssh and the rendezvous port are open on the first host",
    "one host has no route to another",
    "large packets are lost on the path",
    "a link of 20 Mbit/s",
    "GLOO_SOCKET_IFNAME names no interface",
    "the ssh key is refused",
    "no ssh server",
    "a host's cable is disconnected",
    "the hostname resolves to 127.0.1.1",
    "a name server that does not answer",
    "another program uses the default rendezvous port",
    "/dev/shm with a container's default size",
    "a low limit of open files",
    "the disk for runs is full",
    "another version of torch",
    "an NVLink is down",
    "one value in a million that a host sends is wrong",
    "a device is five times slower than the others",
    "a rank never reaches the first all-reduce",
)
_CASES = {
    fault.name: fault for fault in ALL if fault.name in _EACH_NIGHT or "EVERY_FAULT" in os.environ
}


@pytest.mark.parametrize("fault", nightly_except(_EACH_CHANGE, _CASES))
def test_named_and_mended(fault: Catalogued, make_lab: MakeLab) -> None:
    lab = make_lab(fault.hosts)
    work = lab.folder / "work"
    work.mkdir()
    with injected(lab, *fault.faults):
        found = _check(lab, fault, work)
        finding = _the_finding(fault, found)
        if fault.mended_by is not None:
            host = lab.host(fault.mended_by.host)
            do_what_it_says(host, finding["fix"], fault.mended_by.line)
            again = _check(lab, fault, work)
            assert again.named(fault.finding) == []
            assert again.exit_code == 0, again.said


def _check(lab: Lab, fault: Catalogued, work: Path) -> Found:
    quick = () if fault.ranks else ("--quick",)
    return check(lab, *quick, *fault.flags, hosts=fault.host_words, cwd=work)


def _the_finding(fault: Catalogued, found: Found) -> dict[str, str]:
    """Return the finding of this name that has the words; there must be one."""
    for one in found.named(fault.finding):
        if names(one, fault.says) and fault.fix in one["fix"]:
            return one
    raise AssertionError(f"{fault.finding}: {list(fault.says)}, fix {fault.fix!r}\n{found.said}")
