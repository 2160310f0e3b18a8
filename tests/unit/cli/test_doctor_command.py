"""``muster doctor`` as a person and as a scheduler's prolog use it."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import torchmuster
from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.verify.machine.all_checks import SUBJECTS

LIMIT_S = 2.0
# What a machine's administrator decides about, not this test's machine.
OF_SOFTWARE = ("accelerators", "torch", "torch-companions", "collective-libraries", "numpy")


def first_on_path(folder: Path) -> dict[str, str]:
    """An environment in which Python looks into a folder first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.getenv("PYTHONPATH")]))}


@pytest.fixture
def broken_torch(tmp_path: Path) -> dict[str, str]:
    """An environment with a torch that cannot be imported."""
    folder = tmp_path / "broken"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise ImportError('libfoo.so: not found')\n")
    return first_on_path(folder)


def test_a_healthy_machine(muster: Muster) -> None:
    done = muster("doctor", "--only", *OF_SOFTWARE)
    assert done.code == 0, done.out
    *lines, blank, verdict = done.out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in OF_SOFTWARE]
    assert blank == ""
    assert verdict.startswith("fit for a run: nothing is wrong; 5 subjects in ")


def test_every_subject_has_its_line(muster: Muster) -> None:
    done = muster("doctor")
    shown = {words[1] for line in done.out.splitlines() if len(words := line.split()) > 1}
    # Only --deep has checks of the one, and only other systems of the other.
    assert set(SUBJECTS) - shown <= {"torch-at-work", "other-systems"}
    assert done.err == ""


def test_a_failure_is_told_with_its_fix_and_fails_the_command(
    muster: Muster, machine: Callable[[Scenario], Path]
) -> None:
    machine(scenarios.driver_mismatch())
    done = muster("doctor", "--only", "accelerators", "python")
    assert done.code == 1
    assert done.out.splitlines()[0] == "failure  accelerators          1 failure"
    assert "failure  the NVIDIA driver was updated, but the old one is still loaded" in done.out
    assert "         fix  sudo reboot" in done.out
    assert "not fit for a run: 1 failure" in done.out


def test_a_warning_does_not_fail_the_command(muster: Muster) -> None:
    done = muster("doctor", "--only", "variables", env={"CUDA_LAUNCH_BLOCKING": "1"})
    assert done.code == 0
    assert "fit for a run, with 1 warning" in done.out
    assert "         fix  unset CUDA_LAUNCH_BLOCKING" in done.out


def test_json(muster: Muster) -> None:
    done = muster("doctor", "--json", "--only", "torch", "variables", env={"RANK": "1"})
    answer = json.loads(done.out)
    assert set(answer) == {"torchmuster", "seconds", "subjects", "findings"}
    assert answer["subjects"] == {"torch": "ok", "variables": "warning"}
    (found,) = [one for one in answer["findings"] if one["status"] == "warning"]
    assert found["subject"] == "variables"
    assert found["name"] == "left-over-variables"
    assert found["fix"] == "unset RANK"
    assert done.code == 0


def test_an_unknown_subject_is_wrong_usage(muster: Muster) -> None:
    done = muster("doctor", "--only", "gpu")
    assert done.code == 2
    assert "invalid choice: 'gpu'" in done.err


def test_what_is_looked_at(muster: Muster) -> None:
    done = muster("doctor", "--list")
    assert done.code == 0
    assert (
        "torch-at-work         Can torch be imported, make a group, and multiply rightly on each "
        "device?  (--deep)"
    ) in done.out.splitlines()


def test_an_error_text_is_explained(muster: Muster) -> None:
    text = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
    typed = muster("doctor", "--explain", text)
    assert typed.code == 0
    assert typed.out.startswith("warning  shared-library-missing: ")
    assert muster("doctor", "--explain", "-", stdin=text) == typed
    answer = json.loads(muster("doctor", "--explain", text, "--json").out)
    assert answer["findings"][0]["name"] == "shared-library-missing"


# ---- beside a torch that does not work


def test_a_broken_torch(muster: Muster, broken_torch: dict[str, str]) -> None:
    done = muster("doctor", "--only", "torch", "python", env=broken_torch)
    assert done.code == 1
    assert "/broken/torch cannot be imported" in done.out
    assert "its compiled part (torch/_C) is not there" in done.out
    assert "fix  unset PYTHONPATH" in done.out
    assert done.err == ""


def test_a_broken_torch_tried_out(muster: Muster, broken_torch: dict[str, str]) -> None:
    done = muster("doctor", "--deep", "--only", "torch-at-work", env=broken_torch)
    assert done.code == 1
    assert (
        "failure  torch fails while importing torch: ImportError: libfoo.so: not found" in done.out
    )


def test_no_torch_at_all(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    installed = Path(psutil.__file__).parent.parent
    for entry in installed.iterdir():
        if not entry.name.startswith(("torch", "functorch")):
            (packages / entry.name).symlink_to(entry)
    source = Path(torchmuster.__file__).parent.parent
    program = (
        "import sys\n"
        f"sys.path += [{str(packages)!r}, {str(source)!r}]\n"
        "from torchmuster.cli import doctor\n"
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "doctor.add_arguments(parser)\n"
        "options = parser.parse_args(sys.argv[1:])\n"
        "sys.exit(options.run(options))\n"
    )
    # Without site, Python does not know of the packages that are installed.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 1, done.stderr
    assert "failure  torch is not installed" in done.stdout
    assert "check-failed" not in done.stdout
    assert "could not be made" not in done.stdout


def slowdown() -> float:
    """How much longer than it should everything takes here now, because of what else runs."""
    began, used = time.perf_counter(), time.process_time()
    while time.process_time() - used < 0.2:
        pass
    return (time.perf_counter() - began) / 0.2


@pytest.mark.alone
def test_it_answers_within_two_seconds(
    muster: Muster, machine: Callable[[Scenario], Path], record_property: Callable[..., None]
) -> None:
    machine(scenarios.eight_a100())
    times = []
    for _ in range(5):
        before, started = slowdown(), time.perf_counter()
        muster("doctor")
        times.append((time.perf_counter() - started) / ((before + slowdown()) / 2))
    median = statistics.median(times)
    record_property("median_s", median)
    print(f"muster doctor: median of 5: {median:.3f} s")
    assert median < LIMIT_S
