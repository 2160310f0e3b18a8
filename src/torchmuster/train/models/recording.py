"""Building without memory: every tensor is on the meta device, and a tape notes how it came about."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchmuster.errors import Impossible
from torchmuster.train.models.tape import Tape, tensors_in, written_by
from torchmuster.train.torch_private import (
    TorchDispatchMode,
    arguments_of,
    tree_map_only,
    truncated_normal_noted,
    without_modes,
)

_META = torch.device("meta")


@contextlib.contextmanager
def recorded(tape: Tape) -> Iterator[None]:
    """Make all tensors without memory inside the ``with``, and note on the tape how they came about."""
    recording = _Recording(tape)
    # Truncated normal numbers are drawn again until they fit, which cannot be followed without numbers, and for the
    # meta device nothing is drawn at all.
    with truncated_normal_noted(tape.note_draw), recording, _Pretence(recording):
        yield


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes all tensors on the meta device and notes what is done to them."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if given and not any(one.is_meta for one in given):
            return func(*args, **kwargs)  # constants: small, and some are asked for their value
        if _needs_values(func) or any(not one.is_meta for one in written_by(func, args, kwargs)):
            real = tree_map_only(
                torch.Tensor, lambda one: self.value(one, str(func)), (args, kwargs)
            )
            return func(*real[0], **real[1])
        meta_args, meta_kwargs = tree_map_only(
            (torch.Tensor, torch.device), _on_meta, (args, kwargs)
        )
        if not given and any(one.name == "device" for one in arguments_of(func)):
            meta_kwargs["device"] = _META
            kwargs = {**kwargs, "device": kwargs.get("device") or _META}
        try:
            result = func(*meta_args, **meta_kwargs)
        except NotImplementedError as error:
            raise _cannot(f"{func} cannot be run without memory") from error
        self._tape.note(func, args, kwargs, result)
        return result

    def value(self, tensor: torch.Tensor, asker: str) -> torch.Tensor:
        """Return what a tensor's values will be, where they do not depend on random numbers."""
        if not tensor.is_meta:
            return tensor
        window = self._tape.window(tensor)
        if self._tape.is_random(window):
            raise _cannot(f"{asker} asks for the value of a tensor of random numbers")
        with without_modes():
            return self._tape.play(window, torch.device("cpu"), 0)


class _Pretence(TorchFunctionMode):
    """Lets tensors of a tape look as if they had memory, to code that asks.

    Code that meets the meta device may leave out what it has to do (``nn.init.orthogonal_`` does), and
    some readers of memory go past the dispatcher.
    """

    _READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
    _IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
    _DEVICE = torch.Tensor.device.__get__

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in self._READERS:
            args = (self._recording.value(args[0], f"{func.__name__}()"), *args[1:])
        result = func(*args, **(kwargs or {}))
        if func == self._IS_META:
            return False
        return torch.device("cpu") if func == self._DEVICE and result == _META else result


def _on_meta(leaf: torch.Tensor | torch.device) -> Any:
    if isinstance(leaf, torch.device):
        return _META
    return leaf if leaf.is_meta else leaf.to(_META)


def _needs_values(call: Any) -> bool:
    return (
        torch.Tag.data_dependent_output in call.tags or torch.Tag.dynamic_output_shape in call.tags
    )


def _cannot(why: str) -> Impossible:
    return Impossible(
        "this model cannot be built without memory, to be sharded before it has values",
        why=f"{why}, in {_who_asks()}",
        fix="build it with its values and pass it built (single and ddp take it as it is), or move that "
        "line to where the model is built already",
    )


def _who_asks() -> str:
    """Return the line of the model's code that is being run."""
    ours = (torch.__path__[0], __file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(ours):
            return f"{frame.filename}:{frame.lineno}"
    return "code of torch"
