"""The commands of README and of the tutorial, typed as they are printed, each document into a terminal of its own.

Each begins with an empty folder and an empty virtual environment, on a machine without a GPU. Three things differ from
a new user's afternoon, to keep it short and away from the network: the repository is copied instead of cloned; torch and
the other packages are not downloaded but found in the environment of these tests, by a path that is written into the
new one right after it was made; so ``pip install`` builds and installs torchmuster alone. And the training waits before
its end until it was killed: on a busy machine it could be over before that is typed.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from document_examples import BLOCK, as_documented, lines_not_printed, steps, surroundings
from patience import GIVE_UP_S

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
MADE_ENVIRONMENT = "python3 -m venv .venv && . .venv/bin/activate"
# The commands that each document must contain.
PROMISED = {
    "README.md": ("pip install", "muster doctor", "muster gpus", "muster check", "muster run"),
    "docs/tutorial.md": (
        "pip install",
        "muster doctor",
        "muster check",
        "muster plan",
        "muster train --config",
        "kill -9",
        "muster train --resume",
        "muster watch",
        "muster explain",
    ),
}

# Is added to mine.py.
WAIT_TO_BE_KILLED = """

import os, time

steps, usual_model = 0, model


def wait_to_be_killed(*_):
    global steps
    steps += 1
    while steps > 1500 and not os.path.exists("was-killed"):
        time.sleep(0.05)


def model():
    made = usual_model()
    made.register_forward_pre_hook(wait_to_be_killed)
    return made
"""


class Terminal:
    """A shell that is typed into, one command after the other."""

    _END = "end-of-the-command"

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._shell = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def type(self, command: str) -> tuple[int, str]:
        """Run a command to its end; return its exit code and what came onto the screen meanwhile."""
        shell = self._shell
        assert shell.stdin is not None
        assert shell.stdout is not None
        # In braces, so that the shell's own input is not read by the command.
        shell.stdin.write(f"{{\n{command}\n}} < /dev/null\nprintf '\\n%s %s\\n' {self._END} $?\n")
        shell.stdin.flush()
        printed: list[str] = []
        enough = threading.Timer(GIVE_UP_S, self.close)
        enough.start()
        try:
            for line in shell.stdout:
                if line.startswith(self._END):
                    return int(line.split()[1]), "".join(printed).rstrip("\n")
                printed.append(line)
        finally:
            enough.cancel()
        raise AssertionError(f"$ {command}\ndid not end in {GIVE_UP_S:.0f} s:\n{''.join(printed)}")

    def close(self) -> None:
        """End the shell and what it started."""
        if self._shell.poll() is None:
            os.killpg(self._shell.pid, signal.SIGKILL)
        for pipe in (self._shell.stdin, self._shell.stdout):
            if pipe is not None:
                pipe.close()
        self._shell.wait()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Open a terminal of somebody who has Python and nothing else."""
    home = tmp_path / "home"
    home.mkdir()
    inherited = surroundings(home, "no_gpus")
    python = Path(sys._base_executable).parent  # type: ignore[attr-defined]
    environment = {
        **{k: v for k, v in inherited.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))},
        "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin",
        # The new environment finds all packages by its path, also what builds a wheel: nothing is fetched.
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip takes this for "no isolation"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    one = Terminal(home, environment)
    yield one
    one.close()


def typed(document: str) -> Iterator[tuple[str, str, str]]:
    """Yield each command of a document with what is printed and the comment before its block."""
    for block in BLOCK.finditer((ROOT / document).read_text(encoding="utf-8")):
        for command, expected in steps(block["body"]):
            yield command, expected, block["comment"]


@pytest.mark.parametrize("document", PROMISED)
def test_a_document_has_every_promised_command(document: str) -> None:
    commands = [re.sub(r"\s+", " ", command) for command, _, _ in typed(document)]
    for promised in PROMISED[document]:
        assert any(command.startswith(promised) for command in commands), promised
    assert commands[0] == MADE_ENVIRONMENT


@pytest.mark.nightly
@pytest.mark.parametrize("document", PROMISED)
def test_every_command_of_a_document_works_from_an_empty_folder(
    document: str, terminal: Terminal, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    _copy_repository(home / "torchmuster")
    for command, expected, comment in typed(document):
        if command.startswith("muster train --config"):
            with (home / "mine.py").open("a") as mine:
                mine.write(WAIT_TO_BE_KILLED)
        code, printed = terminal.type(command)
        if command.startswith("kill -9"):
            (home / "was-killed").touch()
        printed = as_documented(printed, home)
        said = f"$ {command}\n{printed}"
        print(said)  # all that came before is shown where it fails
        assert code == 0 or "<!-- fails -->" in comment, f"{said}\nexit code {code}"
        if "output: varies" not in comment:
            missing = lines_not_printed(expected, printed)
            assert not missing, f"{said}\nwithout: {missing}"
        if command == MADE_ENVIRONMENT:
            _lend_packages(home / ".venv")
    assert (home / ".venv/bin/muster").exists()


def _copy_repository(to: Path) -> None:
    """Copy what a clone would have, as it is now."""
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            to.mkdir(exist_ok=True)
            shutil.copy(source, to / name)


def _lend_packages(environment: Path) -> None:
    """Let a new virtual environment find the packages of this one, after its own."""
    (site_packages,) = environment.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    assert not list(site_packages.glob("torch*")), "it was empty"
    (site_packages / "packages-of-the-tests.pth").write_text(f"{here}\n")
    for old in site_packages.glob("setuptools*"):  # torch wants a newer one, and would fetch it
        shutil.rmtree(old)
