"""No test may leave anything behind: environment, threads, processes, open files, process groups.

A pytest plugin: every test is compared before and after.
"""

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

# Variables that pytest itself changes from test to test.
_PYTESTS_OWN = {"PYTEST_CURRENT_TEST"}
# Set by torch with the first optimizer; another user of the machine could not write there.
_TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR"
# What is on its way out; a busy machine takes its time.
_END_WITHIN_S = 30.0


@dataclass(frozen=True)
class Traces:
    """What a test could leave behind, at one moment."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[psutil.Process]
    open_files: frozenset[str]
    folder: frozenset[str]
    process_group: bool

    @classmethod
    def now(cls) -> "Traces":
        this = psutil.Process()
        return cls(
            environment={k: v for k, v in os.environ.items() if k not in _PYTESTS_OWN},
            threads=frozenset(threading.enumerate()),
            children=frozenset(this.children(recursive=True)),
            open_files=frozenset(file.path for file in this.open_files()),
            folder=frozenset(path.name for path in Path.cwd().iterdir()),
            process_group=_process_group_is_up(),
        )


def _process_group_is_up() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def leaks(before: Traces, after: Traces) -> list[str]:
    """Say what was left behind."""
    found = []
    changed = {
        name
        for name in before.environment.keys() | after.environment.keys()
        if before.environment.get(name) != after.environment.get(name)
    }
    if changed:
        found.append(f"environment changed: {', '.join(sorted(changed))}")
    for thread in after.threads - before.threads:
        thread.join(_END_WITHIN_S)
    if threads := [one.name for one in after.threads - before.threads if one.is_alive()]:
        found.append(f"threads left running: {', '.join(sorted(threads))}")
    _, alive = psutil.wait_procs(list(after.children - before.children), timeout=_END_WITHIN_S)
    if alive:
        found.append(f"processes left running: {', '.join(str(one) for one in alive)}")
    if files := after.open_files - before.open_files:
        found.append(f"files left open: {', '.join(sorted(files))}")
    # Tools keep their own caches in hidden folders.
    if made := {name for name in after.folder - before.folder if not name.startswith(".")}:
        found.append(f"files left in the working folder: {', '.join(sorted(made))}")
    if after.process_group and not before.process_group:
        found.append("torch.distributed process group left initialized")
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Traces.now()
    yield
    if _TORCHS_OWN not in before.environment:
        os.environ.pop(_TORCHS_OWN, None)
    found = leaks(before, Traces.now())
    if found:
        pytest.fail("the test left something behind: " + "; ".join(found), pytrace=False)
