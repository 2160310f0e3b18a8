"""Fixtures for running the product on machines that are not here: the NVML stand-in, and ``muster``."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import nvml_stub
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.devices.visibility import STAGES

_VISIBILITY = [name for stages in STAGES.values() for stage in stages for name in stage]


@dataclass(frozen=True)
class Stubs:
    """The built stand-ins for NVIDIA's library: of a current driver, and of an old one."""

    current: Path


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    return Stubs(
        current=nvml_stub.build(tmp_path_factory.mktemp("nvml")),
    )


@pytest.fixture
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Claims and history in a folder of the test's own, and no GPU hidden by the environment."""
    monkeypatch.setenv("TORCHMUSTER_CLAIMS_DIR", str(tmp_path / "claims"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [*_VISIBILITY, "CUDA_DEVICE_ORDER"]:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def machine(
    own_machine: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Scenario], Path]:
    """Put this test on a machine: ``machine(scenarios.eight_a100())``, as often as it changes.

    Holds for this process and for those it starts. Loading the library once by its path is enough:
    the binding then gets the same one by its name.
    """
    ctypes.CDLL(str(stubs.current / nvml_stub.LIBRARY), mode=ctypes.RTLD_GLOBAL)
    path = own_machine / "scenario.json"
    monkeypatch.setenv(nvml_stub.SCENARIO_VARIABLE, str(path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stubs.current))
    return lambda scenario: nvml_stub.write(path, scenario)


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


Muster = Callable[..., Result]


@pytest.fixture
def muster(own_machine: Path) -> Muster:
    """Run the real command in a process of its own, in the test's folder."""

    def run(
        *words: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = GIVE_UP_S,
        stdin: str = "",
    ) -> Result:
        done = subprocess.run(
            muster_argv(words),
            cwd=own_machine,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            input=stdin,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


def muster_argv(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "torchmuster", *words]
