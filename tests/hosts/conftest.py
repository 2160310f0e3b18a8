"""Fixtures for tests on real hosts: ``lab2``, ``lab3``, ``lab4`` and ``make_lab``."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from hosts.lab import Lab, remove_abandoned

_TOOLS = ("ip", "tc", "iptables", "sshd", "ssh", "ssh-keygen", "rsync", "unshare", "setpriv", "gcc")


class MakeLab(Protocol):
    def __call__(self, count: int, *, ssh: bool = True) -> Lab: ...


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_hosts_are_impossible()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.hosts)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def why_hosts_are_impossible() -> str | None:
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make: run the tests as root"
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing:
        install = (
            "apt-get install iproute2 iptables openssh-server openssh-client rsync util-linux gcc"
        )
        return f"missing: {', '.join(missing)}; {install}"
    return None


@pytest.fixture(scope="session")
def no_abandoned_labs() -> None:
    remove_abandoned()


@pytest.fixture
def make_lab(no_abandoned_labs: None) -> Iterator[MakeLab]:
    """Make labs, ``make_lab(3, ssh=False)``; all are removed when the test ends."""
    with ExitStack() as labs:

        def make(count: int, *, ssh: bool = True) -> Lab:
            return labs.enter_context(Lab(count, ssh=ssh))

        yield make


@pytest.fixture
def lab2(make_lab: MakeLab) -> Lab:
    return make_lab(2)


@pytest.fixture
def lab3(make_lab: MakeLab) -> Lab:
    return make_lab(3)


@pytest.fixture
def lab4(make_lab: MakeLab) -> Lab:
    return make_lab(4)
