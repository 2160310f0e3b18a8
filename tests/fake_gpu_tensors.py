"""Tensors that say they are on a GPU and have their values in the host's memory: without a GPU, without gradients.

Gradients are impossible: autograd of a torch that is built for the CPU aborts the process for such a device.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fake_accelerator import FakeAccelerator


class FakeGpuTensor(torch.Tensor):
    """A tensor with the device of a GPU and the values of a tensor on the CPU."""

    in_host_memory: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> "FakeGpuTensor":
        """Create it from its values, without a copy."""
        made: FakeGpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=device,
        )
        made.in_host_memory = values
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name the device and the values."""
        return f"FakeGpuTensor({self.in_host_memory!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse to compute outside of :class:`FakeGpu`."""
        raise AssertionError(f"{func} outside of FakeGpu")


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute with such tensors inside the ``with``; the accelerator records copies and pinned memory."""

    def __init__(self, accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator = accelerator
        # Called by factory functions for a device of this type; here it would raise.
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the values; its result is on the device that torch would give it."""
        kwargs = dict(kwargs or {})
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        of_values = {id(one.in_host_memory): one for one in given if isinstance(one, FakeGpuTensor)}
        known = {id(one): one for one in given} | of_values
        device = kwargs.get("device") or next((one.device for one in of_values.values()), None)
        target = torch.device("cpu" if device is None else device)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        pins = kwargs.pop("pin_memory", None) or func is torch.ops.aten._pin_memory.default
        if func is torch.ops.aten._pin_memory.default:
            func = torch.ops.aten.clone.default
        values = tree_map(_values, (args, kwargs))
        if func is torch.ops.aten.is_pinned.default:
            return False
        result = func(*values[0], **values[1])
        if pins:
            self._accelerator.pinned.append(result.nbytes)
        if func is torch.ops.aten.copy_.default and of_values:
            self._accelerator.note("copy_", next(iter(of_values.values())).device)

        def placed(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            if id(one) in known:
                return known[id(one)]
            return FakeGpuTensor(one, target) if target.type == "cuda" else one

        return tree_map(placed, result)


def _values(one: Any) -> Any:
    return one.in_host_memory if isinstance(one, FakeGpuTensor) else one
