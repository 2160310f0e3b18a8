"""No command imports torch before it must: every one is run in a process that would tell."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.cli.main import COMMANDS

# Runs a command line with an import hook that writes down every attempt to import torch.
SPY = """
import sys
from importlib.abc import MetaPathFinder

class Spy(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "matplotlib", "pandas"}:
            print(f"IMPORTED {name}", file=sys.stderr)
        return None

sys.meta_path.insert(0, Spy())
from torchmuster.cli.main import main
try:
    sys.exit(main(sys.argv[1:]))
except SystemExit as end:
    print(f"EXIT {end.code}", file=sys.stderr)
"""

# Every command, the way its user calls it.
LINES = [
    ["--help"],
    ["--version"],
    ["gpus"],
    ["selftest", "--list"],
    ["gpus", "--json"],
    ["gpus", "--links"],
    ["gpus", "pick", "--num", "2"],
    ["gpus", "pick", "--for-model", "14GB", "--json"],
    ["config", "show"],
    ["config", "show", "--json"],
    ["config", "check", "config.yaml"],
    ["config", "schema"],
    ["completion", "bash"],
    ["doctor"],
    ["doctor", "--json", "--only", "torch", "numpy"],
    ["doctor", "--explain", "CUDA out of memory"],
    ["check", "--help"],
    ["plan", "--help"],
    ["bench", "--help"],
    ["bench", "compare", "--help"],
    ["bench", "ab", "--help"],
    ["bench", "matmul", "--help"],
    ["profile", "--help"],
    ["prove", "--help"],
    ["queue"],
    ["queue", "hold", "--help"],
    ["run", "--dry-run", "train.py"],
    ["run", "--dry-run", "--hosts", "a,b:4", "train.py"],
    ["run", "--slurm", "--gpus-per-node", "8", "--dry-run", "train.py"],
    ["train", "--dry-run", "--set", "model.build=train:a", "--set", "data.dataset=train:b"],
    ["kubernetes", "render", "--image", "image", "train.py"],
    ["host", "--help"],
    ["join", "--help"],
    ["smoke", "--help"],
    ["explain", "--help"],
    ["checkpoint", "ls", "."],
    ["checkpoint", "verify", "."],
    ["watch", "--help"],
    ["top", "--once"],
    ["exporter", "--once"],
    ["runs"],
    ["runs", "export", "--help"],
    ["lab", "list"],
    ["lab", "start", "ddp"],
    ["lab", "check", "--help"],
    ["lab", "report", "--help"],
    ["attach", "--help"],
    ["recipe", "list"],
    ["stop", "--help"],
    ["hang", "--help"],
]


def spy(words: list[str], folder: Path, *, program: str = SPY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=dict(os.environ),
        timeout=GIVE_UP_S,
    )


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_no_command_imports_torch(
    words: list[str], machine: Callable[[Scenario], Path], tmp_path: Path
) -> None:
    machine(scenarios.eight_a100_idle())
    (tmp_path / "config.yaml").write_text("experiment_name: x\n")
    (tmp_path / "train.py").touch()
    done = spy(words, tmp_path)
    # The doctor is right to find that this torch cannot use those GPUs.
    code = 1 if words[0] == "doctor" and "--explain" not in words else 0
    assert f"EXIT {code}" in done.stderr, done.stderr
    assert "IMPORTED" not in done.stderr


def test_every_command_is_among_them() -> None:
    assert {line[0] for line in LINES if not line[0].startswith("-")} == set(COMMANDS)


@pytest.mark.parametrize("late", ["", "def late(): "])
def test_the_spy_sees_an_import_of_torch_wherever_it_happens(tmp_path: Path, late: str) -> None:
    # A command that imports torch, at its top or only when it runs, must be found out.
    (tmp_path / "guilty.py").write_text(
        "import argparse\n"
        f"{late}import torch.distributed\n"
        "def add_arguments(parser): parser.set_defaults(run=run)\n"
        f"def run(options):\n    {'late()' if late else 'pass'}\n    return 0\n"
    )
    planted = SPY.replace(
        "from torchmuster.cli.main import main",
        "from torchmuster.cli.main import COMMANDS, Command, main\n"
        "COMMANDS['guilty'] = Command('guilty', 'imports torch')\n"
        "sys.path.insert(0, '.')",
    )
    (tmp_path / "torch").mkdir()  # a stand-in is enough to be imported, and faster
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "distributed.py").write_text("")
    done = spy(["guilty"], tmp_path, program=planted)
    assert "EXIT 0" in done.stderr, done.stderr
    assert "IMPORTED torch" in done.stderr


def test_importing_the_package_does_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal, logging, threading\n"
        "before = dict(os.environ), signal.getsignal(signal.SIGINT), list(logging.root.handlers)\n"
        "import torchmuster.distributed, torchmuster.cli.main, torchmuster.cli.gpus\n"
        "after = dict(os.environ), signal.getsignal(signal.SIGINT), list(logging.root.handlers)\n"
        "assert before == after and threading.active_count() == 1\n"
        "assert not {'torch', 'rich', 'ruamel'} & set(sys.modules), sys.modules.keys()\n"
    )
    done = spy([], tmp_path, program=program)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
