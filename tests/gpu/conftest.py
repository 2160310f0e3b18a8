"""What the GPU tests share, and the file that they write.

    pytest -n 0 -m gpu tests/gpu

The tests start ``muster`` on free GPUs of this host. At the end, ``build/gpu-tests.json`` has the versions, the models of the
GPUs and the outcome of each test. It has no text of a test, so no names of hosts, users or folders.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
OUTCOMES = pytest.StashKey[dict[str, str]]()
WITHIN_S = 540

Muster = Callable[..., str]


def pytest_configure(config: pytest.Config) -> None:
    """Make room for the outcomes."""
    config.stash[OUTCOMES] = {}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them without GPUs."""
    gpus = torch.cuda.device_count()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker("gpu")
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else 1
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs that torch can use"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Keep the outcome of a test; a failed setup or teardown fails it."""
    report = yield
    outcomes = item.config.stash[OUTCOMES]
    is_result = report.when == "call" or not report.passed
    if HERE in item.path.parents and is_result and outcomes.get(item.name) != "failed":
        outcomes[item.name] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the result file, if a test ran."""
    outcomes = session.config.stash[OUTCOMES]
    if set(outcomes.values()) <= {"skipped"}:
        return
    file = session.config.rootpath / "build" / "gpu-tests.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**versions(), "tests": outcomes}, indent=1) + "\n")
    print(f"\nresult file: {file}")


def versions() -> dict[str, Any]:
    """Return what identifies hardware and software, without names of hosts."""
    # Asked in another process: this one never starts CUDA.
    program = "import torch; print('.'.join(map(str, torch.cuda.nccl.version())))"
    nccl = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    listed = "--query-gpu=name,memory.total,driver_version"
    query = ["nvidia-smi", listed, "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        gpus = []
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": nccl.stdout.strip(),
        "gpus": gpus,
    }


@pytest.fixture
def muster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Muster:
    """Run a command of muster in the test's folder and return its output; another exit code fails the test."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, exit_codes: tuple[int, ...] = (0,), **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "torchmuster", *words],
            env={**os.environ, "PYTHONPATH": str(HERE), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert done.returncode in exit_codes, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
