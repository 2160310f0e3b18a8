"""Findings as people and programs get them."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import ConfigError, DevicesBusy, ExitCode, Mistake
from torchmuster.finding import Finding, Status, exit_code, from_error, render, worst_first

COMMAND = "sudo nvidia-smi --gpu-reset --id=GPU-0515791b-9f8f-58f5-98b5-48e51d0d99d9"


def finding(
    status: Status, what: str = "it", *, why: str = "", fix: str = "", seen: str = ""
) -> Finding:
    return Finding(name="a-name", status=status, what=what, why=why, fix=fix, evidence=seen)


def test_a_whole_finding_as_plain_text(snapshot: SnapshotAssertion) -> None:
    one = finding(Status.FAILURE, "GPU 3 is lost", why="Xid 79", fix="reboot", seen="dmesg says")
    assert [line.split(maxsplit=1)[0] for line in render([one]).splitlines()] == [
        "failure",
        "why",
        "fix",
        "seen",
    ]
    assert render([one]) == snapshot


def test_what_is_empty_takes_no_line() -> None:
    assert render([finding(Status.OK, "fine")]) == "ok       fine"
    assert render([]) == ""


def test_several_lines_stay_below_each_other(snapshot: SnapshotAssertion) -> None:
    one = finding(Status.NOTE, "first\nsecond", fix="muster gpus --wait\nmuster gpus --share")
    assert render([one]) == snapshot


@pytest.mark.parametrize(
    ("status", "label"),
    [
        (Status.OK, "\x1b[32mok      \x1b[0m"),
        (Status.NOTE, "\x1b[36mnote    \x1b[0m"),
        (Status.WARNING, "\x1b[33mwarning \x1b[0m"),
        (Status.FAILURE, "\x1b[31mfailure \x1b[0m"),
    ],
)
def test_colour_marks_the_status_alone(status: Status, label: str) -> None:
    one = finding(status, "it", fix="mend")
    assert render([one], colour=True) == f"{label} it\n         fix  mend"
    assert re.sub(r"\x1b\[\d+m", "", render([one], colour=True)) == render([one])


def test_prose_is_wrapped_to_the_width() -> None:
    one = finding(Status.WARNING, "slow", why="the link runs at half its speed " * 6)
    lines = render([one], width=60).splitlines()
    assert len(lines) > 3
    assert max(len(line) for line in lines) <= 60
    assert all(line.startswith(" " * 14) for line in lines[2:])


@settings(deadline=None)
@given(
    words=st.lists(st.from_regex(r"[a-z0-9=./-]{1,70}", fullmatch=True), min_size=1, max_size=12),
    width=st.integers(min_value=1, max_value=120),
)
def test_wrapping_never_breaks_a_word(words: list[str], width: int) -> None:
    shown = render([finding(Status.FAILURE, fix=" ".join(words))], width=width)
    assert shown.split() == ["failure", "it", "fix", *words]


@pytest.mark.parametrize("width", range(40, 100, 3))
def test_a_command_longer_than_the_terminal_can_still_be_copied(width: int) -> None:
    command = f"{COMMAND} && train.py --fsdp-sharding-strategy=hybrid-shard --well-known-flag"
    shown = render([finding(Status.FAILURE, fix=command)], width=width)
    assert shown.split()[3:] == command.split()


def test_what_another_machine_says_cannot_steer_the_terminal() -> None:
    one = Finding(
        name="x", status=Status.NOTE, what="a\x1b[2J", why="b\x9bc", fix="d\ne\tf", evidence="\x07g"
    )
    told = render([one])
    assert told.splitlines() == [
        "note     a\ufffd[2J",
        "         why  b\ufffdc",
        "         fix  d",
        "              e\tf",
        "         seen \ufffdg",
    ]


def test_the_worst_comes_first_and_equals_keep_their_order() -> None:
    given_order = [
        finding(Status.OK, "1"),
        finding(Status.FAILURE, "2"),
        finding(Status.NOTE, "3"),
        finding(Status.WARNING, "4"),
        finding(Status.FAILURE, "5"),
    ]
    assert [one.what for one in worst_first(given_order)] == ["2", "5", "4", "3", "1"]
    headlines = [line.split()[-1] for line in render(given_order).splitlines()]
    assert headlines == ["2", "5", "4", "3", "1"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(Status)))
def test_only_a_failure_makes_a_command_fail(statuses: list[Status]) -> None:
    code = exit_code(finding(status) for status in statuses)
    assert code is (ExitCode.FAILED if Status.FAILURE in statuses else ExitCode.GOOD)


@pytest.mark.parametrize("one", [finding(Status.OK), finding(Status.NOTE, fix="x", seen="y")])
def test_programs_find_every_key_in_every_finding(one: Finding) -> None:
    stored = json.loads(json.dumps(one.as_json()))
    assert list(stored) == ["name", "status", "what", "why", "fix", "evidence"]
    assert stored == {
        "name": "a-name",
        "status": one.status.value,
        "what": "it",
        "why": "",
        "fix": one.fix,
        "evidence": one.evidence,
    }


def test_an_error_becomes_one_failure_with_its_three_parts() -> None:
    error = DevicesBusy("2 of 4 are free", why="ann uses the others", fix="--wait")
    assert from_error(error) == [
        Finding(
            name="devices-busy",
            status=Status.FAILURE,
            what="2 of 4 are free",
            why="ann uses the others",
            fix="--wait",
        )
    ]


def test_wrong_settings_become_one_failure_each(snapshot: SnapshotAssertion) -> None:
    error = ConfigError(
        [
            Mistake(where="c.yaml:1:1", what="modle is not a setting", fix="did you mean model?"),
            Mistake(where="$TORCHMUSTER_X", what="is not a setting"),
        ]
    )
    assert render(from_error(error)) == snapshot
    assert {one.name for one in from_error(error)} == {"config-error"}
