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

import torchmuster
from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S

pytestmark = pytest.mark.slow


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


def test_a_healthy_machine_is_ready_and_all_shows_what_is_well(muster: Muster) -> None:
    short, everything = muster("doctor"), muster("doctor", "--all")
    assert (short.code, short.err) == (everything.code, everything.err) == (0, "")
    for done in (short, everything):
        assert done.out.splitlines()[-1].startswith("ready for a run")
    assert "\nok " not in short.out
    assert re.search("^ok       torch 2", everything.out, re.MULTILINE)


def test_a_failure_is_shown_with_its_fix_and_fails_the_command(
    muster: Muster, machine: Callable[[Scenario], Path]
) -> None:
    machine(scenarios.driver_mismatch())
    done = muster("doctor")
    assert done.code == 1
    assert "         fix  sudo reboot" in done.out
    assert done.out.splitlines()[-1].startswith("not ready for a run")


def test_json_and_a_warning_that_does_not_fail_the_command(muster: Muster) -> None:
    done = muster("doctor", "--json", env={"CUDA_LAUNCH_BLOCKING": "1"})
    answer = json.loads(done.out)
    assert set(answer) == {"torchmuster", "seconds", "findings"}
    (found,) = [one for one in answer["findings"] if one["name"] == "harmful-variable"]
    assert (found["status"], found["fix"]) == ("warning", "unset CUDA_LAUNCH_BLOCKING")
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


def test_a_broken_torch(muster: Muster, broken_torch: dict[str, str]) -> None:
    done = muster("doctor", "--json", env=broken_torch)
    assert (done.code, done.err) == (1, "")
    found = {one["name"]: one for one in json.loads(done.out)["findings"]}
    assert "torch/_C" in found["torch-broken"]["why"]


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
