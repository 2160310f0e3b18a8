"""Trace training steps: the peak of live tensors in every stage, and the work of every part.

torch's own ``MemTracker`` fails on gradient accumulation and is 2-5 times slower.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.plan.probes import four_bit
from torchmuster.plan.probes.build_step import BuiltStep
from torchmuster.plan.probes.cuda_kernels import room_of_attention_backward
from torchmuster.plan.probes.operations import (
    flops_of,
    moved_bytes_of,
    scratch_bytes_of,
    tensors_in,
    with_float32_statistics,
)
from torchmuster.plan.record import Cost, Part, Peak, PhaseName
from torchmuster.plan.torch_private import (
    ATTENTION_BACKWARD,
    READ_VALUE,
    computing_backward,
    current_backward,
    paused_in_sharding_propagation,
    storage_id,
)
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.torch_private import TorchDispatchMode, base_of

HOST = "host"  # the category of offloaded tensors, which take no memory of the device
# What is usually created in a phase.
_CATEGORIES = {
    "forward": "activations",
    "loss": "logits",
    "backward": "gradients",
    "check": "optimizer",
    "update": "optimizer",
}
_UPDATE: tuple[PhaseName, ...] = ("check", "update")


class Stage(NamedTuple):
    """A part of a step: in a pass, from the entry into a block to the entry into the next."""

    phase: PhaseName = "forward"
    micro_batch: int = 0
    block: int | None = None  # None: before the first block of this pass, or in no pass


class _Storage:
    """A live storage."""

    __slots__ = ("category", "created_by", "reference", "size_bytes")

    def __init__(self, category: str) -> None:
        self.category = category
        self.size_bytes = 0
        self.created_by = current_backward()  # the operation whose backward created it
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class StepTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow all operations inside the ``with`` :meth:`followed`.

    The peak of a stage is noted before memory is freed and where the stage changes: between these
    moments the live bytes only grow.
    """

    def __init__(
        self,
        *,
        on_host: bool,
        offload: bool = False,
        values: Mapping[PhaseName, float] | None = None,
    ) -> None:
        """Start with nothing.

        ``on_host``: ranks compute on CPUs and communicate over gloo, which clones what it scatters
        and gathers. ``offload``: shards, their gradients and the update are on the host. ``values``
        are read from tensors without values in these phases.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.by_category: Counter[str] = Counter()
        self.peaks: dict[Stage, Peak] = {}
        self.costs: dict[Part, Cost] = {}
        self.stage = Stage()
        self._last_micro_batch = 0
        self._on_host = on_host
        self._offload = offload
        self._values = values or {}
        self._storages: dict[int, _Storage] = {}
        self._summed: int | None = None  # the storage of a gradient that was just added to
        self._paused = False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all operations inside the ``with``."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)  # FSDP frees gathered blocks with this
            self.see(storage, "collectives")
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            with paused_in_sharding_propagation(self._pause), self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ---- stages

    def begin_step(self) -> None:
        """Forget the peaks and the work of the step before."""
        self.peaks.clear()
        self.costs.clear()
        self.stage = Stage()
        self.note_peak()

    def begin(self, phase: PhaseName, micro_batch: int = 0, block: int | None = None) -> None:
        """Begin a stage."""
        self.note_peak()
        self.stage = Stage(phase, micro_batch, block)
        self.note_peak()

    def _enter(self, block: int, phase: PhaseName) -> None:
        """Enter a block, unless a backward recomputes its forward."""
        if self.stage.phase == phase:
            self.begin(phase, self.stage.micro_batch, block)

    @contextmanager
    def stages_of(self, built: BuiltStep) -> Iterator[None]:
        """Notice the stages of the training steps inside the ``with``."""
        with ExitStack() as hooks:
            hooks.callback(
                built.model.register_forward_hook(
                    lambda *_: self.begin("loss", self.stage.micro_batch)
                ).remove
            )
            hooks.callback(
                built.optimizer.register_step_pre_hook(lambda *_: self.begin("update")).remove
            )
            for number, block in enumerate(built.blocks):
                self._notice_block(number, block, hooks)
            yield

    def _notice_block(self, number: int, block: nn.Module, hooks: ExitStack) -> None:
        """Notice the forward of a block, and its backward by the gradients of its results.

        The hooks run before FSDP's, so that its gathers count to the block.
        """

        def entered(*_: Any) -> None:
            self._enter(number, "forward")

        def left(module: nn.Module, args: Any, result: Any) -> None:
            for tensor in tensors_in([result]):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._enter(number, "backward"))  # type: ignore[no-untyped-call]

        hooks.callback(block.register_forward_pre_hook(entered, prepend=True).remove)
        hooks.callback(block.register_forward_hook(left, prepend=True).remove)

    def with_stages(self, step: Step) -> Step:
        """Return the step, whose micro-batches report the start of their forward."""
        self._last_micro_batch = step.rounds - 1

        def reported() -> Iterator[MicroBatch]:
            micro_batches = iter(step)
            for number in range(step.rounds):
                self.begin("forward", number)
                yield next(micro_batches)

        return replace(step, micro_batches=reported())

    # ---- operations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched again
        if self._paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if func is READ_VALUE and self.stage.phase in self._values:
            return _as_read_from(args[0], self._values[self.stage.phase])
        if four_bit.is_product(func):  # its kernel has large temporary tensors
            with self:
                return four_bit.product(*args, **kwargs)
        self._summed = None
        inputs = tensors_in([*args, *kwargs.values()])
        for tensor in inputs:  # storages created in C++, which no mode sees
            self.see_tensor(tensor)
        if func.namespace == "c10d":
            self._note_collective(func.overloadpacket.__name__, inputs)
            return func(*args, **kwargs)
        if func is ATTENTION_BACKWARD and not self._on_host:
            self._take_for_a_moment(room_of_attention_backward(args[1], args[2]))
        result = func(*args, **kwargs)
        result = with_float32_statistics(func, args, result, on_host=self._on_host)
        if func is torch.ops.aten.add.Tensor and self._adds_gradients(*args[:2]):
            self._summed = storage_id(args[0].untyped_storage())
        results = tensors_in([result])
        is_gathered = func.overloadpacket.__name__ == "all_gather_copy_in"
        for tensor in results:
            self.see_tensor(tensor, "collectives" if is_gathered else None)
        scratch_bytes = scratch_bytes_of(func, args) if self._on_host else 0
        if scratch_bytes:
            self._take_for_a_moment(scratch_bytes)
        flops = flops_of(func, args, kwargs, result)
        moved = 0 if flops else moved_bytes_of(func, args, inputs, results)
        if flops or moved:
            self._note_work(str((results or inputs)[0].dtype), flops, moved)
        return result

    def _cost(self) -> Cost:
        part: Part = "first"
        if self.stage.phase in _UPDATE:
            part = "update"
        elif self.stage.micro_batch == self._last_micro_batch:
            part = "last"
        return self.costs.setdefault(part, Cost())

    def _note_work(self, dtype: str, flops: int, moved_bytes: int) -> None:
        cost = self._cost()
        cost.operations += 1
        cost.moved_bytes += moved_bytes
        if flops:
            name = dtype.removeprefix("torch.")
            cost.flops[name] = cost.flops.get(name, 0) + flops

    def _note_collective(self, name: str, tensors: list[torch.Tensor]) -> None:
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        if not sizes:
            return
        whole_bytes = max(sizes)  # the largest tensor is the whole of what is moved
        if "reduce_scatter" in name or "allgather" in name:
            if "reduce_scatter" in name and self._offload:
                self.see_tensor(tensors[0], HOST)
            self.note_sent("shards", whole_bytes)
            if self._on_host:
                self._take_for_a_moment(whole_bytes)
        elif "allreduce" in name:
            self.note_sent("copies", 2 * whole_bytes)

    def note_sent(self, group: str, size_bytes: int) -> None:
        """Count the bytes that a collective sends among shards, or among copies."""
        sent = self._cost().sent_bytes
        sent[group] = sent.get(group, 0) + size_bytes

    # ---- memory

    def note_peak(self) -> None:
        """Raise the peak of the current stage to the live bytes."""
        peak = self.peaks.get(self.stage)
        if peak is None or self.live_bytes > peak.peak_bytes:
            phase, micro_batch, block = self.stage
            self.peaks[self.stage] = Peak(
                phase=phase,
                micro_batch=micro_batch,
                block=block,
                peak_bytes=self.live_bytes,
                by_category=dict(self.by_category),
            )

    def see_tensor(self, tensor: torch.Tensor, category: str | None = None) -> None:
        """Count a tensor's storage; ``category`` replaces the usual one of its phase."""
        local = local_part(tensor)
        if local.device.type != "meta":
            self.see(local.untyped_storage(), category)

    def see(self, storage: torch.UntypedStorage, category: str | None = None) -> None:
        """Count a storage with its current size."""
        key = storage_id(storage)
        entry = self._storages.get(key)
        if entry is None:
            entry = self._storages[key] = _Storage(category or self._usual_category())
            entry.reference = weakref.ref(storage, lambda _: self._forget(key))
        size_bytes = storage.nbytes()
        if category is not None and category != entry.category:
            self._change_size(entry, 0)
            entry.category = category
        if size_bytes < entry.size_bytes:
            self.note_peak()
        self._change_size(entry, size_bytes)

    def _change_size(self, entry: _Storage, size_bytes: int) -> None:
        more_bytes = size_bytes - entry.size_bytes
        entry.size_bytes = size_bytes
        if entry.category != HOST:
            self.live_bytes += more_bytes
            self.by_category[entry.category] += more_bytes

    def _forget(self, key: int) -> None:
        entry = self._storages.pop(key)
        if key != self._summed:
            self.note_peak()
        self._change_size(entry, 0)

    def _usual_category(self) -> str:
        phase = self.stage.phase
        if self._offload and phase in _UPDATE:
            return HOST
        if phase == "backward" and torch.is_grad_enabled() and computing_backward():
            return "activations"  # of a forward that the backward recomputes
        return _CATEGORIES[phase]

    def _take_for_a_moment(self, size_bytes: int) -> None:
        """Count memory that an operation allocates and frees itself."""
        self.live_bytes += size_bytes
        self.by_category["collectives"] += size_bytes
        self.note_peak()
        self.live_bytes -= size_bytes
        self.by_category["collectives"] -= size_bytes

    def _adds_gradients(self, first: Any, second: Any) -> bool:
        """Return whether a backward adds up several gradients of one tensor, possibly in place.

        torch adds to an unshared gradient in place. With an active dispatch mode it creates a new
        tensor instead, and frees the old one at once. An operation's own operand is created by it,
        or kept until it has finished. A view keeps its base alive, so torch adds in a new tensor.
        """
        if torch.is_grad_enabled() or not computing_backward() or base_of(first) is not first:
            return False
        if not isinstance(second, torch.Tensor):
            return False
        storage = self._storages.get(storage_id(first.untyped_storage()))
        if storage is None or storage is self._storages.get(storage_id(second.untyped_storage())):
            return False
        return storage.created_by != current_backward()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or this rank's part of a distributed one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_read_from(tensor: torch.Tensor, value: float) -> float | int | bool:
    if tensor.dtype is torch.bool:
        return bool(value)
    if tensor.dtype.is_floating_point:
        return value
    return int(value)
