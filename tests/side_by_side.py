"""Tests run side by side; one that is marked ``alone`` has the machine to itself.

A pytest plugin for runs with workers (pytest-xdist, ``-n``). Tests of all workers share a lock; one that
is alone waits until nobody else holds it. Without workers nothing is locked.
"""

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

_FOLDER = "folder_of_locks"
# What a fixture of theirs trains or measures takes half a minute, and each worker would do it anew.
_SHARE_A_FIXTURE = (
    "tests/ranks/test_kill_matrix.py",
    "tests/ranks/test_muster_train_settings.py",
    "tests/ranks/test_plan_memory.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(Path(config.workerinput[_FOLDER])))
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(Controller())


@pytest.hookimpl(optionalhook=True)  # there is none where tests only run one by one
def pytest_xdist_auto_num_workers() -> int:
    """Most tests wait now and then, so one more than there are cores (``-n auto``)."""
    return len(os.sched_getaffinity(0)) + 1


class Controller:
    """In the process that starts the workers."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="muster-tests-")

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_FOLDER] = self._folder.name

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Give each worker the next test, as it gets on; what belongs together comes first."""
        from xdist.scheduler import LoadScopeScheduling

        scheduler = LoadScopeScheduling(config, log)
        # Its own --dist loadgroup does not group with pytest 9.2: pytest-dev/pytest-xdist#1386.
        scheduler._split_scope = _belongs_to
        return scheduler

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


def _belongs_to(nodeid: str) -> str:
    """Return the name of what runs on one worker in its order, which is mostly the test itself."""
    file = nodeid.partition("::")[0]
    if file.endswith(".md"):  # what one block defines, the next may use
        return file
    if file.startswith("tests/slurm/"):  # they share a cluster
        return "slurm"
    if file in _SHARE_A_FIXTURE:
        return file
    return nodeid


class Worker:
    """In each worker, around each test."""

    def __init__(self, folder: Path) -> None:
        # Who wants to be alone keeps the door shut, or there would always be somebody inside.
        self._door = (folder / "door").open("w")
        self._inside = (folder / "inside").open("w")
        for name in ("COLUMNS", "LINES"):  # set by readline in the process that started this one
            os.environ.pop(name, None)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=_is_alone)  # last, when nobody else has to wait for them

    # Outside of pytest-timeout: waiting for others is not the test's own time.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._alone() if _is_alone(item) else self._in_company():
            return (yield)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _locked(self._door, fcntl.LOCK_EX), _locked(self._inside, fcntl.LOCK_EX):
            yield

    @contextmanager
    def _in_company(self) -> Iterator[None]:
        with ExitStack() as company:
            with _locked(self._door, fcntl.LOCK_EX):
                company.enter_context(_locked(self._inside, fcntl.LOCK_SH))
            yield

    def pytest_unconfigure(self) -> None:
        self._inside.close()
        self._door.close()


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@contextmanager
def _locked(file: IO[str], kind: int) -> Iterator[None]:
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
