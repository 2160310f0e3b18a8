"""A rehearsal with a few hosts: the real launcher, and what is reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.cli.main import main
from torchmuster.rehearse import control_plane, rehearsal, report
from torchmuster.rehearse.control_plane import ControlPlane
from torchmuster.rehearse.failures import GPU_HOURS_PER_FAILURE
from torchmuster.rehearse.rehearsal import HostStart, RehearsalRequest, forecast_saving, rehearse

MEASURED = ControlPlane(
    hosts=1024,
    ranks=8192,
    simulated=1024,
    start_s=2.0,
    start_cpu_s=1.5,
    sent_bytes=2_000_000,
    heartbeats_cpu=0.05,
    chatty_cpu=None,
    memory_bytes=100 * 2**20,
    restart_s=1.0,
    notice_s=10.0,
    stop_s=0.1,
)
REQUEST = RehearsalRequest(
    hosts=1024, parameters=70e9, step_s=10.0, gpu_hours_per_failure=GPU_HOURS_PER_FAILURE
)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def plane(hosts: int, **_: float) -> ControlPlane:
        return MEASURED.for_hosts(hosts)

    monkeypatch.setattr(rehearsal, "measure_control_plane", plane)
    start = HostStart(seconds=4.0, cpu_s=5.0, launcher_cpu_s=1.0)
    monkeypatch.setattr(rehearsal, "measure_host_start", lambda: start)


def test_the_launcher_itself_is_measured() -> None:
    found = control_plane.measure(6, quiet_s=0.0, chatty_s=0.2)
    assert (found.hosts, found.ranks) == (6, 48)
    assert found.start_s > 0
    assert found.restart_s > 0
    assert 1_000 < found.sent_bytes / 6 < 20_000
    assert found.notice_s is not None
    assert found.notice_s > 5  # the default of --lost-after is 10 s
    assert found.stop_s is not None


def test_twice_the_hosts_need_twice_the_launcher() -> None:
    double = MEASURED.for_hosts(2048)
    assert double.start_s == 4.0
    assert double.heartbeats_cpu == 0.1
    assert double.simulated == 1024
    assert double.notice_s == 10.0


def test_a_checkpoint_grows_with_the_model_and_its_files_with_the_ranks() -> None:
    small, large = (forecast_saving(replace(REQUEST, hosts=hosts), 70e9) for hosts in (64, 128))
    assert small.size_bytes == large.size_bytes == 840e9
    assert large.files - 3 == 2 * (small.files - 3) == 2 * 8 * 128
    assert large.save_s < small.save_s


def test_ranks_that_agree_on_a_save_take_time() -> None:
    small, large = (forecast_saving(replace(REQUEST, hosts=hosts), 70e9) for hosts in (512, 4096))
    assert large.agree_s == pytest.approx(8 * small.agree_s)
    assert large.agree_s > 10 > large.write_s  # 32,768 ranks
    assert large.stall_s == 0  # a step takes 10 s
    assert forecast_saving(replace(REQUEST, hosts=4096, step_s=None), 70e9).stall_s > 1


def test_hosts_on_one_machine_share_one_launcher() -> None:
    result = rehearse(replace(REQUEST, parameters=None), lambda words: None)
    assert result.start_on_one_machine_s(2) == 2.0 + (1.0 + 1024 * 5.0) / 2


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--html", "/nowhere/page.html"], "cannot write /nowhere/page.html"),
        (["--gpu", "H100"], "--gpu has no effect"),
        (["--config", "config.yaml"], "--config needs"),
        (["--spares", "2"], "--spares has no effect"),
    ],
)
def test_what_has_no_effect_is_refused_before_anything_is_measured(
    flags: list[str],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(rehearsal, "measure_control_plane")
    assert main(["rehearse", "--nodes", "4", *flags]) == 2
    assert what in capsys.readouterr().err


def test_the_text_names_the_source_of_each_figure(
    snapshot: SnapshotAssertion,
) -> None:
    result = rehearse(REQUEST, lambda words: None)
    assert report.rehearsal_text(result) == snapshot
    assert result.failures is not None
    assert 0.9 < result.failures.low <= result.failures.goodput <= result.failures.high < 1


def test_without_a_model_only_the_launcher_is_reported() -> None:
    result = rehearse(replace(REQUEST, parameters=None), lambda words: None)
    assert result.saving is None
    assert {name for name, _, _ in report.rehearsal_rows(result)} == {
        "start",
        "launcher",
        "dead host",
    }


@pytest.mark.parametrize(("load", "is_told"), [(0.1, False), (1e6, True)])
def test_a_busy_machine_is_reported(
    load: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    said: list[str] = []
    rehearse(replace(REQUEST, parameters=None), said.append)
    assert any("load" in words for words in said) == is_told


def test_more_hosts_than_can_be_simulated_are_computed() -> None:
    said: list[str] = []
    result = rehearse(replace(REQUEST, hosts=20_000, parameters=None), said.append)
    assert result.control.hosts == 20_000
    assert any("extrapolated" in words for words in said)


def test_the_command_prints_json_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = ["rehearse", "--nodes", "20000", "--parameters", "8B", "--spares", "2"]
    assert main([*words, "--json", "--html", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hosts"] == 20_000
    assert told["failures"]["spares"] == 2
    assert page.read_text().count("<svg") == 3
