"""What a thread's stack says: where in the user's own code it is, what it is doing there, in which phase.

Runs inside the ranks, beside whatever is installed there: standard library only.
"""

import itertools
import linecache
import os
import re
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from torchmuster.launch import torch_private

# Functions of torch.distributed that end only when the other ranks come to them.
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
_WAIT_DEPTH = 4  # the calls within threading's own waits
_FUTURES = str(Path("concurrent", "futures", "_base.py"))
_LIBRARIES = tuple(
    sorted(
        {
            os.path.realpath(path) + os.sep
            for name in ("stdlib", "platstdlib", "purelib", "platlib")
            if (path := sysconfig.get_paths().get(name))
        }
    )
)
_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"


def _in_torch(*parts: str) -> str:
    return f"{os.sep}{Path('torch', *parts)}"


_TORCH = _in_torch() + os.sep
_DISTRIBUTED = _in_torch("distributed")
_DATA, _DATA_LOADER = _in_torch("utils", "data"), _in_torch("utils", "data", "dataloader.py")
_CUDA = _in_torch("cuda")
_SERIALIZATION = _in_torch("serialization.py")
_COMPILERS = tuple(map(_in_torch, torch_private.COMPILERS))
_MODULES = _in_torch("nn", "modules")
_OPTIMIZER = _in_torch("optim", "optimizer.py")
_CHECKPOINT = _in_torch("distributed", "checkpoint")
_CALLED = re.compile(r"([\w.]+)\s*\(")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a stack says; "" where it says nothing."""

    place: str = ""
    doing: str = ""
    phase: str = ""
    waiting: bool = False


def read(innermost: FrameType | None) -> Reading:
    """Read a thread's stack from its innermost frame."""
    frames = list(_outwards(innermost))
    own = _own_frame(frames)
    doing, waiting = _doing(frames, own)
    phases = (_phase(frame.f_code) for frame in frames)
    return Reading(
        place=_place(own) if own is not None else "",
        doing=doing,
        phase=next((phase for phase in phases if phase), ""),
        waiting=waiting,
    )


def waits_for_thread(innermost: FrameType | None) -> bool:
    """Say whether a thread only waits for another one to end, or for what that one works out."""
    return any(
        (frame.f_code.co_name == "join" and frame.f_code.co_filename == threading.__file__)
        or (frame.f_code.co_name == "result" and _FUTURES in frame.f_code.co_filename)
        for frame in itertools.islice(_outwards(innermost), _WAIT_DEPTH)
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_LONGEST_STACK):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _own_frame(frames: list[FrameType]) -> FrameType | None:
    """Return the innermost frame of the user's code; where there is none, of ours."""
    ours = None
    for frame in frames:
        kind = _kind(frame.f_code.co_filename)
        if kind == "own":
            return frame
        if kind == "ours" and ours is None:
            ours = frame
    return ours


_kinds: dict[str, str] = {}


def _kind(file: str) -> str:
    """Say whose a file is: the user's own, a library's, or ours."""
    kind = _kinds.get(file)
    if kind is None:
        path = os.path.realpath(file)
        if file.startswith("<") or path.startswith(_LIBRARIES) or "-packages" + os.sep in path:
            kind = "library"
        elif path.startswith(_OURS):
            kind = "launcher" if os.sep + "launch" + os.sep in path else "ours"
        else:
            kind = "own"
        _kinds[file] = kind
    return kind


def _place(frame: FrameType) -> str:
    code = frame.f_code
    function = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{Path(code.co_filename).name}:{frame.f_lineno}{function}"


def _doing(frames: list[FrameType], own: FrameType | None) -> tuple[str, bool]:
    """Return the innermost thing that has a name, and whether it is a wait for other ranks."""
    collective = ""
    for frame in frames:
        code = frame.f_code
        if frame is own:
            break
        if _DISTRIBUTED in code.co_filename:
            if code.co_name in WAITS_FOR_OTHERS:
                collective = code.co_name  # the outermost counts: all_gather_object, not all_gather
        elif collective:
            break
        elif name := _known(code):
            return name, False
    if collective:
        return collective, True
    return (_called_by(own) if own is not None else ""), False


def _known(code: CodeType) -> str:
    """Return the name of what a function of torch's does, where people know it by another name."""
    file, name = code.co_filename, code.co_name
    if name == "__next__" and _DATA_LOADER in file:
        return "DataLoader.__next__"
    if name == torch_private.BACKWARD:
        return "backward"
    if name == "synchronize" and _CUDA in file:
        return "cuda.synchronize"
    if name in ("save", "load") and _SERIALIZATION in file:
        return f"torch.{name}"
    return ""


def _phase(code: CodeType) -> str:
    """Return the phase of a training step that a frame shows."""
    file, name = code.co_filename, code.co_name
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
    """Return what a frame is just calling, as it is written there: ``time.sleep``."""
    number = max(0, frame.f_lasti // 2)
    place = next(itertools.islice(frame.f_code.co_positions(), number, None), None)
    line, _, begin, _ = place or (None, None, None, None)
    if line is None or begin is None:  # without debug ranges
        return ""
    # Columns are counted in bytes.
    text = (
        linecache.getline(frame.f_code.co_filename, line).encode()[begin:].decode(errors="replace")
    )
    called = _CALLED.match(text)
    return called[1] if called else ""
