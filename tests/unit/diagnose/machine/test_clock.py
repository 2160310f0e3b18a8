"""The clock: its date, its source, and who keeps it."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import all_well, made_up_machine, only
from torchmuster.diagnose.machine import clock
from torchmuster.finding import Status

(CHECK,) = clock.CHECKS
FOLDER = "sys/devices/system/clocksource/clocksource0"


def source(current: str, available: str) -> dict[str, object]:
    return {f"{FOLDER}/current_clocksource": current, f"{FOLDER}/available_clocksource": available}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that something keeps, at a time that can be."""
    monkeypatch.setattr(clock, "_kernel_status", lambda: 0x2001)
    set_time(monkeypatch, 2026)


def set_time(monkeypatch: pytest.MonkeyPatch, year: int) -> None:
    seconds = datetime(year, 1, 31, 12, tzinfo=UTC).timestamp()
    monkeypatch.setattr("time.time", lambda: seconds)


@pytest.mark.parametrize(
    "name", ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"]
)
def test_good_sources(tmp_path: Path, name: str) -> None:
    seen = all_well(CHECK, made_up_machine(tmp_path, source(name, name)))
    assert seen.startswith("2026-01-31 12:00 UTC")
    assert name in seen


@pytest.mark.parametrize("year", [1970, 2019, 2120])
def test_a_date_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, year: int, snapshot: SnapshotAssertion
) -> None:
    set_time(monkeypatch, year)
    finding = only(CHECK, made_up_machine(tmp_path, source("tsc", "tsc")))
    assert (finding.name, finding.status) == ("date-wrong", Status.FAILURE)
    assert f"{year}-01-31" in finding.what
    assert finding == snapshot
    assert finding.fix.startswith("sudo timedatectl set-ntp true")


def test_a_slow_source_with_a_better_one_at_hand(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    finding = only(CHECK, made_up_machine(tmp_path, source("hpet", "tsc hpet acpi_pm")))
    assert (finding.name, finding.status) == ("clock-source-slow", Status.WARNING)
    assert "hpet" in finding.what
    assert finding == snapshot
    assert finding.fix == f"echo tsc | sudo tee /{FOLDER}/current_clocksource"


def test_a_virtual_machine_that_has_no_other(tmp_path: Path) -> None:
    files = source("acpi_pm", "acpi_pm") | {"proc/cpuinfo": "flags : fpu hypervisor sse\n"}
    assert only(CHECK, made_up_machine(tmp_path, files)).status is Status.NOTE
    better = files | source("acpi_pm", "tsc acpi_pm")
    assert only(CHECK, made_up_machine(tmp_path, better)).status is Status.WARNING
    files["proc/cpuinfo"] = "flags : fpu sse\n"
    assert only(CHECK, made_up_machine(tmp_path, files)).status is Status.WARNING


def test_a_clock_that_nobody_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_kernel_status", lambda: 0x40)
    finding = only(CHECK, made_up_machine(tmp_path, source("tsc", "tsc")))
    assert (finding.name, finding.status) == ("clock-unsynchronized", Status.NOTE)
    monkeypatch.setattr(clock, "_kernel_status", lambda: None)
    all_well(CHECK, made_up_machine(tmp_path, source("tsc", "tsc")))


def test_the_real_kernel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    status = clock._kernel_status()
    assert status is None or status >= 0
