"""What the tests of labs use: the learner's code on this rank, known mistakes, and records of calls.

A test is marked with :func:`exercise` and named after its exercise. Started by pytest, it runs on ranks of its own, and
fails with the hint for the mistake.
"""

import faulthandler
import importlib.util
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from torchmuster.finding import render
from torchmuster.labs import grading
from torchmuster.labs.grading import Verdict
from torchmuster.labs.lesson import Exercise, lesson
from torchmuster.labs.torch_private import TorchDispatchMode
from torchmuster.labs.torch_private import forward_hooks as forward_hooks
from torchmuster.runfolder import write_atomically

torch.compiler.reset()  # imports torch's compiler, a second that each rank's first optimizer would take

ROUNDING = 1e-4
_MESSAGE_LINES = 6  # of an error, after its first line


class Mistake(BaseException):
    """A named mistake; ``seen`` is the evidence.

    Not an Exception: it may be raised inside the learner's code, which may catch those.
    """

    def __init__(self, name: str, seen: str = "") -> None:
        super().__init__(name)
        self.name = name
        self.seen = seen


def require(good: bool, otherwise: str, seen: str = "") -> None:
    """Stop the test with a mistake unless the condition holds."""
    if not good:
        raise Mistake(otherwise, seen)


def compare(
    value: Any,
    expected: Any,
    what: str,
    known: Mapping[str, Any] | None = None,
    *,
    rtol: float = ROUNDING,
) -> None:
    """Stop the test unless a result is as expected, within rounding.

    ``known`` are mistakes, each with the result that it gives.
    """
    if is_close(value, expected, rtol=rtol):
        return
    seen = f"{what} gave {_short(value)}, expected {_short(expected)}"
    for name, result in (known or {}).items():
        require(not is_close(value, result, rtol=rtol), name, seen)
    raise Mistake("wrong-value", seen)


def is_close(value: Any, other: Any, *, rtol: float = ROUNDING) -> bool:
    """Return whether two numbers or tensors of one shape agree within rounding; other values if they are equal."""
    try:
        left = torch.as_tensor(value, dtype=torch.float64)
        right = torch.as_tensor(other, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return bool(value == other)
    return left.shape == right.shape and torch.allclose(left, right, rtol=rtol, atol=1e-6)


@contextmanager
def without(otherwise: str, *errors: type[Exception]) -> Iterator[None]:
    """Stop the test with a mistake if the learner's code raises one of these errors."""
    try:
        yield
    except NotImplementedError:
        raise
    except errors as error:
        seen = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Mistake(otherwise, seen) from None


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().flatten().tolist()[:4]
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    return repr(value)


class LearnersModule:
    """The learner's module; a missing name is a mistake of the learner, not an internal error."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = _load(self._file)
        if not hasattr(self._module, name):
            raise Mistake("missing", f"{self._file.name} has no {name}")
        return getattr(self._module, name)

    def replaced(self, name: str, value: Any) -> Any:
        """Replace a name of the module temporarily."""
        getattr(self, name)
        return replaced(self._module, name, value)


class Submission:
    """What a test gets: the learner's ``code`` on this rank, and a folder that the ranks share."""

    def __init__(self, *, file: Path, rank: int, world_size: int, folder: Path) -> None:
        self.code = LearnersModule(file)
        self.rank = rank
        self.world_size = world_size
        self.folder = folder


Test = Callable[[Submission], None]


def exercise(test: Test) -> Callable[[], None]:
    """Make a test of a submission one that pytest can run, on the file in the folder above."""

    def graded() -> None:
        __tracebackhide__ = True
        tests = Path(test.__code__.co_filename)
        lab = lesson(tests.stem.removeprefix("test_").replace("_", "-"))
        name = test.__name__.removeprefix("test_")
        file = tests.parent.parent / f"{lab.module}.py"
        (verdict,) = grading.grade(lab, file, [name], tests=tests)
        if verdict.mistake:
            raise AssertionError(render([grading.mistake_finding(lab, verdict)]))

    graded.__doc__ = test.__doc__
    graded.test = test  # type: ignore[attr-defined]
    return graded


# ---- in a rank


def run_exercise(rank: int, exercise: Exercise, tests: Path, file: Path, folder: Path) -> None:
    """Run one test as this rank, write its verdict, and wait to be killed.

    A rank that exits early would break the connections of the others.
    """
    # What the learner sees is of the learner's file, not of the test.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module=re.escape(file.stem))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stack = (folder / f"stack-{rank}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    submission = Submission(
        file=file, rank=rank, world_size=exercise.ranks, folder=folder / "scratch"
    )
    mistake, seen = "", ""
    try:
        test = getattr(_load(tests), f"test_{exercise.name}").test
        if exercise.joined and exercise.ranks > 1:
            dist.init_process_group("gloo")
            dist.barrier()  # a rank that leaves at once would cut off one that still connects
        test(submission)
    except Mistake as error:
        mistake, seen = error.name, error.seen
    except BaseException as error:
        mistake, seen = "raised", _evidence(error, file)
        if isinstance(error, NotImplementedError):
            mistake = "not-done"
        elif isinstance(error, SystemExit | KeyboardInterrupt):
            mistake = "ended"
    verdict = Verdict(exercise=exercise.name, mistake=mistake, seen=seen)
    text = msgspec.json.encode(verdict).decode()
    write_atomically(folder / f"verdict-{rank}.json", text, durable=False)
    while True:
        signal.pause()


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _evidence(error: BaseException, file: Path) -> str:
    """Return an error, the learner's lines of its traceback, and the rest of its message."""
    message, *more = [line for line in str(error).splitlines() if line.strip()] or [""]
    lines = [f"{type(error).__name__}: {message}"]
    if isinstance(error, SyntaxError):
        lines.append(f"  {file.name}:{error.lineno}")
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(file):
            lines.append(f"  {file.name}:{frame.lineno}, in {frame.name}: {frame.line}")
    return "\n".join([*lines, *more[:_MESSAGE_LINES]])


# ---- records of what the learner's code does, without a change of its results


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a name temporarily."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def watched(
    owner: Any, name: str, before: Callable[..., object] | None = None
) -> Iterator[list[tuple[Any, Any]]]:
    """Record the calls of a function; ``before`` gets the arguments of each call first."""
    calls: list[tuple[Any, Any]] = []  # positional and named arguments
    original = getattr(owner, name)

    def watching(*arguments: Any, **named: Any) -> Any:
        calls.append((arguments, named))
        if before is not None:
            before(*arguments, **named)
        return original(*arguments, **named)

    with replaced(owner, name, watching):
        yield calls


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd saves for backward, each storage once, without parameters.

    ``with_repeats`` counts a storage each time it is saved.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self._parameters = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        self._known = set(self._parameters)
        self.total = self.with_repeats = 0

    def __enter__(self) -> "SavedBytes":  # type: ignore[override]
        """Begin to count."""
        super().__enter__()
        return self

    def _pack(self, saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.with_repeats += storage.nbytes()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.total += storage.nbytes()
        return saved


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``seen(name, result)`` for every operation below autograd."""

    def __init__(self, seen: Callable[[str, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen(func.overloadpacket.__name__, result)
        return result
