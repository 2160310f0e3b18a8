"""Examining a machine: all checks at once, each with its deadline, none able to hold up the rest."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from device_strategies import node
from patience import GIVE_UP_S
from torchmuster.devices.model import Node
from torchmuster.diagnose.check import Check, SharedSnapshot, Surroundings
from torchmuster.diagnose.host_checks import run_checks
from torchmuster.diagnose.machine.all_checks import load
from torchmuster.finding import Finding, Status


def found(what: str = "seen") -> Finding:
    return Finding(name="x", status=Status.OK, what=what)


def a_check(name: str = "a", run: Any = lambda _: [found()], **fields: Any) -> Check:
    fields.setdefault("deadline_s", GIVE_UP_S)
    return Check(name=name, asks="Is it?", run=run, **fields)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Something to hang on, that lets go when the test is over."""
    before = set(threading.enumerate())
    event = threading.Event()
    yield event
    event.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(GIVE_UP_S)


def test_checks_of_other_systems_are_left_out() -> None:
    checks = [
        a_check("instant", lambda _: [found("instant")]),
        a_check("windows", systems=("win32",)),
        a_check("linux", lambda _: [found("linux")], systems=("linux",)),
    ]
    findings = run_checks(Surroundings(system="linux"), checks)
    assert [one.what for one in findings] == ["instant", "linux"]


def test_a_check_that_raises_is_a_note_and_stops_nothing() -> None:
    def bad(_: Surroundings) -> Iterator[Finding]:
        raise ZeroDivisionError("by zero")

    examined = run_checks(Surroundings(), [a_check("bad", bad), a_check()])
    broken, well = examined
    assert (broken.name, broken.status) == ("check-failed", Status.NOTE)
    assert broken.why == "ZeroDivisionError: by zero"
    assert well.status is Status.OK


def test_a_check_that_finds_nothing_is_well() -> None:
    (well,) = run_checks(Surroundings(), [a_check("a", lambda _: [])])
    assert (well.name, well.status, well.what) == ("a", Status.OK, "Is it?")


def test_a_check_that_hangs_is_given_up(released: threading.Event) -> None:
    def hangs(_: Surroundings) -> list[Finding]:
        released.wait()
        return []

    examined = run_checks(Surroundings(), [a_check("hangs", hangs, deadline_s=0.2), a_check()])
    given_up, _ = examined
    assert (given_up.name, given_up.status) == ("check-hangs", Status.WARNING)


def test_devices_that_do_not_answer_are_one_finding(released: threading.Event) -> None:
    def take() -> Node:
        released.wait()
        return node()

    def looks(surroundings: Surroundings) -> list[Finding]:
        surroundings.take_snapshot()
        return [found()]

    here = Surroundings(take_snapshot=SharedSnapshot(take, within_s=0.2))
    examined = run_checks(here, [a_check("1", looks), a_check("2", looks), a_check()])
    silent, _ = examined  # two checks have waited for the same driver
    assert (silent.name, silent.status) == ("check-hangs", Status.WARNING)
    assert "sudo nvidia-smi -pm 1" in silent.fix


# ---- the table of all checks


def test_every_check_has_a_name_of_its_own_and_a_question() -> None:
    names: dict[tuple[str, tuple[str, ...]], str] = {}
    for check in load():
        assert (check.name, check.systems) not in names
        names[check.name, check.systems] = check.asks
        assert check.asks.endswith("?"), check.name
        assert check.name == check.name.lower(), check.name
