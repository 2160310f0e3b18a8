"""Read a thread's stack: the line in the user's code, what it is doing there, and the phase.

Runs inside the ranks, whatever is installed there: standard library only. ``read_stack`` also reads stacks that
were taken from outside (``diagnose/hang/``).
"""

import enum
import functools
import itertools
import linecache
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torchmuster.launch import torch_private

# Functions of torch.distributed that return only when the other ranks call them too.
WAITS_FOR_OTHERS = frozenset(
    {"all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_object"}
    | {"all_gather_into_tensor", "all_gather_coalesced", "all_gather_single", "reduce_scatter"}
    | {"reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"}
    | {"broadcast", "broadcast_object_list", "reduce", "gather", "gather_object", "scatter"}
    | {"scatter_object_list", "barrier", "monitored_barrier", "send", "recv"}
    | {"send_object_list", "recv_object_list", "init_process_group", "new_group"}
    | {"init_device_mesh"}
)
_LONGEST_STACK = 400
_WAIT_DEPTH = 4  # the calls within threading's wait functions
_THREADING = f"{os.sep}threading.py"
_FUTURES = str(Path("concurrent", "futures", "_base.py"))
_LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# A stack taken from outside may be of another Python, with its libraries elsewhere.
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_STANDARD = re.compile(r"[/\\]lib(?:64)?[/\\]python\d\.\d+t?[/\\]")
_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_LAUNCHER = f"{_OURS}launch{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"
_DISTRIBUTED = f"{_TORCH}distributed"
_DATA = f"{_TORCH}utils{os.sep}data"
_DATA_LOADER = f"{_DATA}{os.sep}dataloader.py"
_CUDA = f"{_TORCH}cuda"
_SERIALIZATION = f"{_TORCH}serialization.py"
_COMPILERS = tuple(_TORCH + folder for folder in torch_private.COMPILERS)
_MODULES = f"{_TORCH}nn{os.sep}modules"
_OPTIMIZER = f"{_TORCH}optim{os.sep}optimizer.py"
_CHECKPOINT = f"{_DISTRIBUTED}{os.sep}checkpoint"
_CHECKPOINTER = str(Path("train", "checkpointing", "checkpointer.py"))  # our own saves
_IMPORT_SYSTEM = "<frozen importlib"
_CALLED = re.compile(r"([\w.]+)\s*\(")
_IMPORTED = re.compile(r"(?:from|import)\s+([\w.]+(?:, *[\w.]+)*)")


class Owner(enum.Enum):
    """Whose code a file is."""

    USER = "user"
    MUSTER = "muster"  # a module that trains
    LAUNCHER = "launcher"  # a part of muster that only starts and watches
    PACKAGE = "package"  # an installed package
    LIBRARY = "library"  # torch or the standard library


class StackFrame(NamedTuple):
    """A call in a stack: the file, the function's bare name, and the line."""

    file: str
    function: str
    line: int


@dataclass(frozen=True, kw_only=True)
class ThreadReading:
    """What a stack shows; "" for unknown parts."""

    place: str = ""
    doing: str = ""
    phase: str = ""
    waiting: bool = False


def read_main_thread(innermost: FrameType | None) -> ThreadReading:
    """Return what a thread of this process is doing, from its innermost frame."""
    frames = list(_outwards(innermost))
    return read_stack(list(map(_stack_frame, frames)), lambda place: _called_by(frames[place]))


def read_stack(frames: Sequence[StackFrame], call_in: Callable[[int], str]) -> ThreadReading:
    """Return what a thread is doing, from its stack, innermost frame first.

    ``call_in`` returns the call in progress in one of the frames, as written in the source.
    """
    own = own_frame(frames)
    doing, waiting = _doing(frames, own)
    place = ""
    if own is not None:
        place = _place(frames[own])
        doing = doing or call_in(own)
    phase = ""
    for index, frame in enumerate(frames):
        phase = phase or _phase_of(frame)
        if frame.file.startswith(_IMPORT_SYSTEM) and (own is None or index < own):
            phase = ""  # the frames so far set up a module that is being imported
    return ThreadReading(place=place, doing=doing, phase=phase, waiting=waiting)


def waits_for_thread(innermost: FrameType | None) -> bool:
    """Return whether a thread of this process only waits for another thread."""
    return is_waiting_for_thread(list(map(_stack_frame, _outwards(innermost, _WAIT_DEPTH))))


def is_waiting_for_thread(frames: Sequence[StackFrame]) -> bool:
    """Return whether a stack only waits for another thread to finish, or for its result."""
    for frame in frames[:_WAIT_DEPTH]:
        if frame.function == "join" and frame.file.endswith(_THREADING):
            return True
        if frame.function == "result" and frame.file.endswith(_FUTURES):
            return True
    return False


def _outwards(frame: FrameType | None, most: int = _LONGEST_STACK) -> Iterator[FrameType]:
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _stack_frame(frame: FrameType) -> StackFrame:
    return StackFrame(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno or 0)


def own_frame(frames: Sequence[StackFrame]) -> int | None:
    """Return the place of the innermost frame of the user's code.

    If there is none, of ours; else of an installed package other than torch, such as a trainer started with ``-m``.
    """
    innermost: dict[Owner, int] = {}
    for index, frame in enumerate(frames):
        owner = owner_of(frame.file)
        if owner is Owner.USER:
            return index
        innermost.setdefault(owner, index)
    return innermost.get(Owner.MUSTER, innermost.get(Owner.PACKAGE))


@functools.cache
def owner_of(file: str) -> Owner:
    """Return whose code a file is."""
    path = os.path.realpath(file)
    if file.startswith("<"):
        return Owner.LIBRARY
    if path.startswith(_LAUNCHER):
        return Owner.LAUNCHER
    if path.startswith(_OURS):
        return Owner.MUSTER
    if _PACKAGES.search(path):
        return Owner.LIBRARY if _TORCH in path else Owner.PACKAGE
    if path.startswith(_LIBRARIES) or _STANDARD.search(path):
        return Owner.LIBRARY
    return Owner.USER


def _place(frame: StackFrame) -> str:
    place = f"{Path(frame.file).name}:{frame.line}"
    return place if frame.function == "<module>" else f"{place} in {frame.function}"


def _doing(frames: Sequence[StackFrame], own: int | None) -> tuple[str, bool]:
    """Return the innermost known operation below the user's code, and whether it waits for other ranks."""
    collective = ""
    for frame in frames[:own]:
        if _DISTRIBUTED in frame.file:
            if (
                frame.function in WAITS_FOR_OTHERS
            ):  # the outermost: all_gather_object, not all_gather
                collective = frame.function
        elif collective:
            break
        else:
            name = _torch_operation(frame)
            if name:
                return name, False
    return collective, bool(collective)


def _torch_operation(frame: StackFrame) -> str:
    """Return the common name of a torch function, if it has one."""
    file, name = frame.file, frame.function
    if name == "__next__" and _DATA_LOADER in file:
        return "DataLoader.__next__"
    if name == torch_private.BACKWARD:
        return "backward"
    if name == "synchronize" and _CUDA in file:
        return "cuda.synchronize"
    if name in ("save", "load") and _SERIALIZATION in file:
        return f"torch.{name}"
    return ""


def _phase_of(frame: StackFrame) -> str:
    """Return the phase of a training step that a frame belongs to."""
    file, name = frame.file, frame.function
    if name == "save" and file.endswith(_CHECKPOINTER):
        return "saving"
    if _TORCH not in file:
        return ""
    if name == "__next__" and _DATA in file:
        return "loading data"
    if name == torch_private.BACKWARD:
        return "backward"
    if any(folder in file for folder in _COMPILERS) and "compile" in name:
        return "compiling"
    if name == torch_private.CALL_MODULE and _MODULES in file:
        return "forward"
    if name == "wrapper" and _OPTIMIZER in file:
        return "update"
    if (name == "save" and _SERIALIZATION in file) or ("save" in name and _CHECKPOINT in file):
        return "saving"
    return ""


def _called_by(frame: FrameType) -> str:
    """Return the call or import in progress as written in the source: ``time.sleep``, ``import torch``."""
    number = max(0, frame.f_lasti // 2)
    place = next(itertools.islice(frame.f_code.co_positions(), number, None), None)
    line, _, begin, _ = place or (None, None, None, None)
    if line is None or begin is None:  # without debug ranges
        return ""
    # Columns are counted in bytes.
    text = (
        linecache.getline(frame.f_code.co_filename, line).encode()[begin:].decode(errors="replace")
    )
    if called := _CALLED.match(text):
        return called[1]
    imported = _IMPORTED.match(text)
    return f"import {imported[1]}" if imported else ""
