"""``muster doctor`` as a person and as a scheduler's prolog use it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

import torchmuster
from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.diagnose.machine.all_checks import SUBJECTS

pytestmark = pytest.mark.slow

# What a machine's administrator decides about, not this test's machine.
OF_SOFTWARE = ("accelerators", "torch", "packages")


def timeless(output: str) -> str:
    return re.sub(r" in [\d.]+ m?s$", " in TIME", output.rstrip())


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


def test_a_healthy_machine(muster: Muster, snapshot: SnapshotAssertion) -> None:
    short = muster("doctor", "--only", ",".join(OF_SOFTWARE))
    assert short.code == 0
    assert "ready for a run" in short.out.splitlines()[-1]
    done = muster("doctor", "--all", "--only", ",".join(OF_SOFTWARE))
    assert done.code == 0, done.out
    *lines, blank, verdict = done.out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in OF_SOFTWARE]
    assert blank == ""
    assert timeless(verdict) == snapshot


def test_every_subject_has_its_line(muster: Muster) -> None:
    done = muster("doctor", "--all")
    shown = {words[1] for line in done.out.splitlines() if len(words := line.split()) > 1}
    assert set(SUBJECTS) <= shown
    assert done.err == ""


def test_a_failure_is_told_with_its_fix_and_fails_the_command(
    muster: Muster, machine: Callable[[Scenario], Path], snapshot: SnapshotAssertion
) -> None:
    machine(scenarios.driver_mismatch())
    done = muster("doctor", "--only", "accelerators")
    assert done.code == 1
    assert "         fix  sudo reboot" in done.out
    assert timeless(done.out) == snapshot


def test_a_warning_does_not_fail_the_command(muster: Muster, snapshot: SnapshotAssertion) -> None:
    done = muster("doctor", "--only", "variables", env={"CUDA_LAUNCH_BLOCKING": "1"})
    assert done.code == 0
    assert "         fix  unset CUDA_LAUNCH_BLOCKING" in done.out
    assert timeless(done.out.splitlines()[-1]) == snapshot


def test_json(muster: Muster) -> None:
    done = muster("doctor", "--json", "--only", "torch,variables", env={"RANK": "1"})
    answer = json.loads(done.out)
    assert set(answer) == {"torchmuster", "seconds", "subjects", "findings"}
    assert answer["subjects"] == {"torch": "ok", "variables": "warning"}
    (found,) = [one for one in answer["findings"] if one["status"] == "warning"]
    assert found["subject"] == "variables"
    assert found["name"] == "left-over-variables"
    assert found["fix"] == "unset RANK"
    assert done.code == 0


def test_an_error_text_is_explained(muster: Muster) -> None:
    text = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
    typed = muster("doctor", "--explain", text)
    assert typed.code == 0
    assert typed.out.startswith("warning  shared-library-missing: ")
    assert muster("doctor", "--explain", "-", stdin=text) == typed
    answer = json.loads(muster("doctor", "--explain", text, "--json").out)
    assert answer["findings"][0]["name"] == "shared-library-missing"


# ---- beside a torch that does not work


def test_a_broken_torch(
    muster: Muster, broken_torch: dict[str, str], snapshot: SnapshotAssertion
) -> None:
    done = muster("doctor", "--only", "torch,python", "--json", env=broken_torch)
    assert (done.code, done.err) == (1, "")
    found = {one["name"]: one for one in json.loads(done.out)["findings"]}
    assert found["torch-broken"]["why"] == snapshot


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
        "from torchmuster.cli.options import add_flags, read_options\n"
        "parser = argparse.ArgumentParser()\n"
        "add_flags(parser, doctor.DoctorOptions)\n"
        "sys.exit(doctor.run(read_options(doctor.DoctorOptions, parser.parse_args(sys.argv[1:]))))\n"
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
    assert "could not run" not in done.stdout
