"""The environment of a check: the learner's code, this rank, and reporting of mistakes."""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from torchmuster.runfolder import write_atomically


class Recognized(BaseException):
    """A named mistake; ``seen`` is the evidence.

    Not an Exception: it may be raised inside the learner's code, which may catch those.
    """

    def __init__(self, name: str, seen: str = "") -> None:
        super().__init__(name)
        self.name = name
        self.seen = seen


def mistake(name: str, seen: str = "") -> NoReturn:
    """Stop the check with this mistake."""
    raise Recognized(name, seen)


def require(good: bool, otherwise: str, seen: str = "") -> None:
    """Stop the check with a mistake unless the condition holds."""
    if not good:
        raise Recognized(otherwise, seen)


def compare(value: Any, expected: Any, what: str, otherwise: str = "wrong-value") -> None:
    """Stop the check unless a number or tensor has the expected value, within rounding."""
    got = torch.as_tensor(value, dtype=torch.float64)
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    same = got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)
    require(
        bool(same),
        otherwise,
        f"{what} gave {_short(value)}, expected {_short(expected)}",
    )


def is_close(value: Any, other: Any) -> bool:
    """Return whether two numbers or tensors of one shape agree within rounding."""
    left = torch.as_tensor(value, dtype=torch.float64)
    right = torch.as_tensor(other, dtype=torch.float64)
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-6)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().flatten()[:4].tolist() if value.dim() else value.item()
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return repr(value)


class Learner:
    """The learner's module; a missing name is a mistake of the learner, not an internal error."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        module = self._loaded()
        if not hasattr(module, name):
            mistake("missing", f"{self._file.name} has no {name}")
        return getattr(module, name)

    def replace(self, name: str, value: Any) -> None:
        """Replace a name in the module before it is tested."""
        getattr(self, name)
        setattr(self._loaded(), name, value)

    def _loaded(self) -> ModuleType:
        if self._module is None:
            spec = importlib.util.spec_from_file_location(self._file.stem, self._file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[self._file.stem] = module  # dataclasses look their module up
            spec.loader.exec_module(module)
            self._module = module
        return self._module


class Bench:
    """One rank of an exercise. ``folder`` is initially empty, and shared by the ranks."""

    def __init__(self, *, file: Path, rank: int, world_size: int, folder: Path) -> None:
        self.code = Learner(file)
        self.rank = rank
        self.world_size = world_size
        self.folder = folder

    def tell(self, name: str, text: str) -> None:
        """Write a text for the other rank, without a process group."""
        write_atomically(self.folder / name, text, durable=False)

    def told(self, name: str) -> str:
        """Wait for a text of the other rank."""
        while not (self.folder / name).exists():
            time.sleep(0.005)
        return (self.folder / name).read_text(encoding="utf-8")
