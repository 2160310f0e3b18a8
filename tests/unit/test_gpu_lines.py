"""The rules that find the lines which only an accelerator executes."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_lines.py"


@pytest.fixture(scope="module")
def gpu_lines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_lines", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_lines"] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def marked(gpu_lines: ModuleType, source: str, path: str = "") -> dict[str, str]:
    """Return the rule of each marked line that ends in a comment, by the comment."""
    found = gpu_lines.GpuLines()
    found.read(source, path)
    comments = {
        number: line.partition("# ")[2] for number, line in enumerate(source.splitlines(), start=1)
    }
    return {comments[line]: rule for line, rule in found.rules.items() if comments[line]}


BRANCHES = """
import torch
def waits(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # a
    if device.type not in ("cpu", "mps"):
        x = 1  # b
    else:
        x = 2  # not 1
    if device.type == "cuda" and x:
        x = 3  # c
    elif x or device.type == "cpu":
        x = 4  # not 2
    else:
        x = 5  # d
    if backend == "nccl" or x:
        x = 6  # not 3: another part may be true
    if torch.version.hip is None:
        x = 7  # not 4
    else:
        x = 8  # e
    if device == "cpu":
        x = 9  # not 5
    else:
        x = 10  # not 6: a request for auto, which may become the CPU
    return x
"""


def test_a_test_is_evaluated_as_without_an_accelerator(gpu_lines: ModuleType) -> None:
    assert marked(gpu_lines, BRANCHES) == dict.fromkeys("abcde", "branch")


NAMES = """
import torch
class Staging:
    def __init__(self, device):
        self._elsewhere = device.type != "cpu"
    def take(self):
        usable = torch.accelerator.current_accelerator(check_available=True)
        if usable is None:
            return 1  # not 1
        self._copy()  # a
    def see(self):
        if self._elsewhere:
            self._copy()  # b
        if self._on_host:
            return 2  # not 2
        return 3  # c
    def _copy(self):
        return 4  # d
    def _both(self):
        return self._elsewhere  # not 3
"""


def test_names_early_returns_and_callers(gpu_lines: ModuleType) -> None:
    assert marked(gpu_lines, NAMES) == {"a": "rest", "b": "branch", "c": "rest", "d": "callers"}


CALLS = """
import torch
def count():
    return torch.cuda.device_count()  # not 1
def name(device):
    x = 1  # a
    return torch.cuda.get_device_name(device)  # b
def use(index):
    if index is not None:
        torch.accelerator.set_device_index(index)  # c
    return index  # not 2
def kinds(device):
    few = 1 if device.type == "cpu" else torch.zeros(1)  # d
    label = "CPU" if device.type == "cpu" else "GPU"  # not 3
    match device.type:
        case "cpu":
            return 1  # not 4
        case "cuda":
            return 2  # e
        case _:
            return 3  # f
"""


def test_calls_that_need_a_device_mark_their_block(gpu_lines: ModuleType) -> None:
    assert marked(gpu_lines, CALLS) == {
        **dict.fromkeys("abc", "call"),
        "d": "part",
        **dict.fromkeys("ef", "branch"),
    }


def test_only_readers_and_files_with_torch_are_read(gpu_lines: ModuleType) -> None:
    source = "def read():\n    return 1  # a\n"
    assert marked(gpu_lines, source) == {}
    assert marked(gpu_lines, source, "src/torchmuster/devices/readers/nvml.py") == {"a": "reader"}
    assert marked(gpu_lines, BRANCHES.replace("import torch\n", "")) == {}


def test_lines_that_never_ran_are_listed(
    gpu_lines: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "import torch\n"
        "def waits(device):\n"
        "    if device.type != 'cpu':\n"
        "        device = 1\n"
        "        device = 2\n"
    )
    record = tmp_path / "record"
    lines = {"executed_lines": [1, 2, 3, 4], "missing_lines": [5]}
    record.write_text(json.dumps({"files": {str(path): lines}}))
    assert gpu_lines.main([str(path), "--coverage", str(record)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}:5  branch",
        "1 of 2 lines executed (50 %); 0 lines of the rule part not counted",
    ]
