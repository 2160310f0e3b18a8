"""Tests run side by side, except those that are marked ``alone``."""

from pathlib import Path

import pytest

import side_by_side
from patience import GIVE_UP_S

pytest_plugins = ["pytester"]

TESTS = Path(__file__).resolve().parent.parent

BODY = """
import time
from contextlib import contextmanager
from pathlib import Path
import pytest

import side_by_side

HERE = Path(__file__).parent

@contextmanager
def inside(name):
    mine = HERE / f"inside-{name}"
    mine.touch()
    yield mine
    mine.unlink()

SEEN = HERE / "seen"

def stay():
    end = time.monotonic() + STAY_S
    while time.monotonic() < end and not SEEN.exists():
        time.sleep(0.01)

def others_appear(mine, within_s):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if set(HERE.glob("inside-*")) - {mine}:
            return True
        time.sleep(0.01)
    return False

@pytest.mark.parametrize("number", range(3))
def test_of_the_crowd(number):
    with inside(number):
        stay()
"""
IN_COMPANY = f"""
STAY_S = {GIVE_UP_S}

def test_in_company():
    with inside("too") as mine:
        assert others_appear(mine, within_s=STAY_S)
    SEEN.touch()
"""
# The others stay for longer than a test that waits for them may take by itself.
ALONE = """
STAY_S = 30

@pytest.mark.alone
@pytest.mark.timeout(25)
@pytest.mark.parametrize("number", range(2))
def test_alone(number):
    with inside(f"alone-{number}") as mine:
        assert not others_appear(mine, within_s=1)
"""
JOBS = """
import os
from pathlib import Path
import pytest

import side_by_side

@pytest.mark.parametrize("number", range(6))
def test_job(number):
    Path(__file__).with_name(f"ran-on-{os.environ['PYTEST_XDIST_WORKER']}").touch()
"""


@pytest.fixture
def beside_a_crowd(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers = alone")
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); pytest_plugins = ['side_by_side']"
    )
    return pytester


@pytest.mark.parametrize(
    ("body", "count"),
    [
        pytest.param(IN_COMPANY, 1, id="a test has company"),
        # They wait for the others, and their time begins after that.
        pytest.param(ALONE, 2, id="those that are alone have none"),
    ],
)
def test_tests_run_side_by_side_or_alone(
    beside_a_crowd: pytest.Pytester, body: str, count: int
) -> None:
    beside_a_crowd.makepyfile(BODY + body)
    result = beside_a_crowd.runpytest_subprocess("-n", "4", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3 + count)


def test_what_shares_a_cluster_runs_on_one_worker(beside_a_crowd: pytest.Pytester) -> None:
    folder = beside_a_crowd.path / "tests" / "slurm"
    folder.mkdir(parents=True)
    (folder / "test_jobs.py").write_text(JOBS)
    result = beside_a_crowd.runpytest_subprocess("-n", "3", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=6)
    assert len(list(folder.glob("ran-on-*"))) == 1


def test_what_shares_a_fixture_exists_and_runs_on_one_worker() -> None:
    for file in side_by_side._SHARE_A_FIXTURE:
        assert (TESTS.parent / file).exists()
        assert side_by_side._belongs_to(f"{file}::test_one") == file
