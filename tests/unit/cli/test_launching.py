"""What a command hands to the launcher."""

from pathlib import Path

import pytest

from torchmuster.cli import jobs, launching
from torchmuster.cli.launch_options import RunOptions
from torchmuster.cli.setting_options import settings_of
from torchmuster.config.layers import Flag
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import launch as launcher
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.runfolder import create_run_folder


class Launcher:
    """Takes the job instead of starting it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grace_s: list[float] = []
        monkeypatch.setattr(launcher, "run_task", self.run_task)

    def run_task(self, task: object, *_: object, **__: object) -> int:
        spec = task.spec  # type: ignore[attr-defined]
        self.grace_s.append(spec.limits.grace_s)
        return 0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return Launcher(monkeypatch)


@pytest.mark.parametrize(("given", "grace_s"), [(None, 25.0), ("30s", 30.0)])
def test_a_scheduler_shortens_only_a_grace_period_that_is_not_set(
    given: str | None,
    grace_s: float,
    taken: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # its KillWait is assumed to be 30 s
    settings = () if given is None else (Flag(flag="--set", path="launch.grace", text=given),)
    options = RunOptions(set=settings)
    resolved = settings_of(options)
    spec = JobSpec(
        name="x", command=("x.py",), folder=str(tmp_path), limits=jobs.limits_of(resolved)
    )
    run = create_run_folder(tmp_path / "runs", "x")
    launching.launch(options, spec, LocalTransport("here"), run, resolved)
    assert taken.grace_s == [grace_s]
