"""The Slurm cluster that the tests of this folder share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import slurm_lab
from slurm.slurm_lab import SlurmLab


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = slurm_lab.missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with SlurmLab(folder=tmp_path_factory.mktemp("slurm") / "lab") as lab:
        yield lab


@pytest.fixture
def cluster(shared_cluster: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """The cluster, idle; this process and those it starts are at its login node."""
    use(shared_cluster, monkeypatch)
    yield shared_cluster
    shared_cluster.clear()


@pytest.fixture
def own_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """A cluster for this test alone, which may break it: that is soon noticed."""
    with SlurmLab(folder=tmp_path / "lab", silent_s=5) as lab:
        use(lab, monkeypatch)
        yield lab


def use(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
        monkeypatch.delenv(name)
    for name, value in lab.variables.items():
        monkeypatch.setenv(name, value)
