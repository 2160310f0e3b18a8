"""``%load_ext torchmuster``: light until it is used, and plain words where IPython is missing."""

import importlib.util
import subprocess
import sys

import pytest

import torchmuster
from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.notebook import command_line


def test_without_ipython_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "IPython" else find(name, package),
    )
    with pytest.raises(Impossible) as refused:
        torchmuster.load_ipython_extension(object())
    assert refused.value.fix == "pip install 'torchmuster[notebook]'"


@pytest.mark.integrations
def test_loading_it_imports_no_torch() -> None:
    program = (
        "import sys, torchmuster\n"
        "class Shell:\n"
        "    def register_magic_function(self, *words): print(words[1:])\n"
        "torchmuster.load_ipython_extension(Shell())\n"
        "assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=GIVE_UP_S
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "('line', 'muster')\n('cell', 'ranks')\n('cell', 'rank')\n"


@pytest.mark.parametrize(
    ("line", "ranks"), [("0", [0]), ("0,2-3", [0, 2, 3]), ("3 1", [1, 3]), ("1-1", [1])]
)
def test_ranks_are_chosen_by_their_numbers(line: str, ranks: list[int]) -> None:
    assert command_line.chosen_ranks(line, 4) == ranks


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "%%rank requires a rank"),
        ("x", "'x' is not a rank"),
        ("-1", "'-1' is not a rank"),
        ("4", "there is no rank 4"),
    ],
)
def test_ranks_that_are_none_are_refused(line: str, what: str) -> None:
    with pytest.raises(Impossible) as refused:
        command_line.chosen_ranks(line, 4)
    assert refused.value.what == what


def test_start_has_the_flags_of_muster_run() -> None:
    line = "start --ranks 2 --gpu-ids 0,2"
    assert command_line.action_and_flags(line) == ("start", ["--ranks", "2", "--gpu-ids", "0,2"])
    assert command_line.action_and_flags("stop") == ("stop", [])


@pytest.mark.parametrize("line", ["begin", "", "stop --ranks 2", "start --hosts=a,b"])
def test_lines_that_are_wrong_are_refused_with_what_is_right(line: str) -> None:
    with pytest.raises(Impossible) as refused:
        command_line.action_and_flags(line)
    assert refused.value.fix
