"""Follow every tensor storage of training steps: live bytes, the peak of each stage, and the work.

torch's own ``MemTracker`` fails on gradient accumulation and is 2-5 times slower.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchmuster.errors import Impossible
from torchmuster.plan.probes import four_bit
from torchmuster.plan.probes.cuda_kernels import room_of_attention_backward
from torchmuster.plan.probes.operations import (
    flops_of,
    moved_bytes_of,
    tensors_in,
    with_kept_statistics,
)
from torchmuster.plan.probes.stages import Stage, Stages
from torchmuster.plan.record import Cost
from torchmuster.plan.torch_private import (
    ALL_GATHER,
    ATTENTION_BACKWARD,
    CANNOT_FOLLOW,
    READ_VALUE,
    REDUCE_SCATTER,
    backward_under_way,
    computing_backward,
    paused_in_sharding_propagation,
    storage_id,
)
from torchmuster.train.torch_private import TorchDispatchMode, base_of

_GATHERS = (ALL_GATHER, "allgather_", "allgather_into_tensor_coalesced_")
_REDUCTIONS = (REDUCE_SCATTER, "reduce_scatter_tensor_coalesced_")
_ALL_REDUCTIONS = ("allreduce_", "allreduce_coalesced_")
HOST = "host"  # the category of offloaded tensors, which take no memory of the device


class _Storage:
    """A live storage."""

    __slots__ = ("category", "created_by", "reference", "size_bytes")

    def __init__(self, category: str) -> None:
        self.category = category
        self.size_bytes = 0
        self.created_by = backward_under_way()  # the operation whose backward created it
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class Level(NamedTuple):
    """Live memory at one moment."""

    total_bytes: int
    by_category: dict[str, int]


class _Work:
    """The operations of one part of a step, added up."""

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.operations = self.forward_flops = self.moved = 0

    def cost(self) -> Cost:
        """Return the sums as plain values."""
        return Cost(
            operations=self.operations,
            flops=dict(self.flops),
            forward_flops=self.forward_flops,
            moved_bytes=self.moved,
            sent_bytes=dict(self.sent),
        )


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow all operations inside the ``with`` :meth:`followed`.

    The peak of a stage is noted before memory is freed and where stages change: between these
    moments the live bytes only grow.
    """

    def __init__(
        self,
        *,
        answer: Callable[[Stage], float | None] = lambda _: None,
        on_host: bool,
        offload: bool = False,
    ) -> None:
        """Start with nothing.

        ``answer`` supplies the value of a tensor that is read in a stage; None: it is unknown
        there. ``on_host``: ranks compute on CPUs and communicate over gloo, which clones scattered
        and gathered tensors. ``offload``: shards, their gradients and the update are on the host.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.stages = Stages(self.note_peak)
        self.live_bytes = 0
        self.by_category: Counter[str] = Counter()
        self.peaks: dict[Stage, Level] = {}
        self.work: dict[tuple[str, int], _Work] = {}  # by phase and micro-batch
        self.copies_group: str | None = None  # name of the group over copies of shards
        self.lost_in = ""  # the module that could not be traced
        self._answer = answer
        self._on_host = on_host
        self._offload = offload
        self._storages: dict[int, _Storage] = {}
        self._summed: int | None = None  # the storage of a gradient that was just added to
        self._paused = 0

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
            with paused_in_sharding_propagation(self.pause, self.go_on), self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def pause(self) -> None:
        """Follow nothing until :meth:`go_on`."""
        self._paused += 1

    def go_on(self) -> None:
        """Follow again."""
        self._paused -= 1

    def begin_step(self) -> None:
        """Forget the peaks and the work of the step before."""
        self.peaks.clear()
        self.work.clear()
        self.stages.now = Stage()
        self.note_peak()

    def note_peak(self) -> None:
        """Raise the peak of the current stage to the live bytes."""
        level = self.peaks.get(self.stages.now)
        if level is None or self.live_bytes > level.total_bytes:
            self.peaks[self.stages.now] = Level(self.live_bytes, dict(self.by_category))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one_type, DTensor) for one_type in types):
            return NotImplemented  # its local tensors are dispatched again
        if self._paused:
            return func(*args, **kwargs)
        if func is READ_VALUE:
            answer = self._answer(self.stages.now)
            if answer is not None:
                return _as(answer, args[0])
        self._summed = None
        if func is torch.ops.prim.device.default:  # the most frequent call
            self.see_tensor(args[0])
            return func(*args, **kwargs)
        if four_bit.is_product(func):  # its kernel has large temporary tensors
            with self:
                return four_bit.product(*args, **kwargs)
        inputs = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        for tensor in inputs:  # storages created in C++, which no mode sees
            self.see_tensor(tensor)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, inputs)
        if func is ATTENTION_BACKWARD and not self._on_host:
            self._take_for_a_moment(room_of_attention_backward(args[1], args[2]))
        try:
            result = func(*args, **kwargs)
        except CANNOT_FOLLOW:
            self.lost_in = self.lost_in or self.stages.module
            raise
        result = with_kept_statistics(func, args, result, on_host=self._on_host)
        if func is torch.ops.aten.add.Tensor and self._adds_gradients(*args[:2]):
            self._summed = storage_id(args[0].untyped_storage())
        results = tensors_in((result,))
        category = None
        if func.namespace == "fsdp" and func.overloadpacket.__name__ == "all_gather_copy_in":
            category = "collectives"
        for tensor in results:
            self.see_tensor(tensor, category)
        self._note_work(func, args, kwargs, result, inputs, results)
        return result

    def _note_work(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        work = self._work_now()
        flops = flops_of(func, args, kwargs, result)
        moved = 0 if flops else moved_bytes_of(func, args, inputs, results)
        if flops or moved:
            work.operations += 1
        work.moved += moved
        if flops:
            work.flops[str((results or inputs)[0].dtype).removeprefix("torch.")] += flops
            if self.stages.now.phase in ("forward", "loss"):
                work.forward_flops += flops

    def _work_now(self) -> _Work:
        stage = self.stages.now
        phase = "update" if stage.phase in ("check", "update") else "micro-batch"
        return self.work.setdefault((phase, stage.micro_batch), _Work())

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
        other = self._storages.get(storage_id(second.untyped_storage()))
        if storage is None or storage is other:
            return False
        return storage.created_by != backward_under_way()

    def _collective(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:
        name = func.overloadpacket.__name__
        group = _group(args)
        if group is None or not inputs:
            return func(*args, **kwargs)
        sharded = name in _GATHERS or name in _REDUCTIONS
        if sharded:
            for tensor in inputs:
                self.see_tensor(tensor, "collectives")
        if name in _REDUCTIONS and self._offload:
            self.see_tensor(inputs[0], HOST)
        # The largest tensor is the whole of what is moved.
        whole_bytes = max(tensor.numel() * tensor.itemsize for tensor in inputs)
        if sharded:
            self._work_now().sent["shards"] += whole_bytes
            if self._on_host:
                self._take_for_a_moment(whole_bytes)
        elif name in _ALL_REDUCTIONS:
            self.note_all_reduce(whole_bytes, group.group_name)
        return func(*args, **kwargs)

    def note_all_reduce(self, size_bytes: int, group_name: str | None = None) -> None:
        """Count an all-reduce."""
        is_copies = group_name is not None and group_name == self.copies_group
        self._work_now().sent["copies" if is_copies else "all"] += 2 * size_bytes

    def _take_for_a_moment(self, size_bytes: int) -> None:
        """Count memory that an operation allocates and frees itself."""
        self.live_bytes += size_bytes
        self.by_category["collectives"] += size_bytes
        self.note_peak()
        self.live_bytes -= size_bytes
        self.by_category["collectives"] -= size_bytes

    def see_tensor(self, tensor: torch.Tensor, category: str | None = None) -> None:
        """Count a tensor's storage; ``category`` replaces the one that its stage suggests."""
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
        if category is not None and category != entry.category and entry.category not in _STATES:
            self._change_size(entry, 0)
            entry.category = category
        if size_bytes != entry.size_bytes:
            if size_bytes < entry.size_bytes:
                self.note_peak()
            self._change_size(entry, size_bytes)

    def _change_size(self, entry: _Storage, size_bytes: int) -> None:
        more = size_bytes - entry.size_bytes
        entry.size_bytes = size_bytes
        if entry.category != HOST:
            self.live_bytes += more
            self.by_category[entry.category] += more

    def _usual_category(self) -> str:
        """Return the category of a storage that is created now."""
        stage = self.stages.now
        if stage.phase == "forward":
            return "activations"
        if stage.phase == "loss":
            return "logits"
        if stage.phase == "backward":
            # A backward runs without gradients; a forward that is recomputed in it runs with them.
            if torch.is_grad_enabled() and computing_backward():
                return "activations"
            if stage.block is None and stage.after_block is None:
                return "logits"  # before the last block's backward there is only the head
            return "gradients"
        return HOST if self._offload else "optimizer"

    def _forget(self, key: int) -> None:
        entry = self._storages.pop(key)
        if entry.size_bytes:
            if key != self._summed:
                self.note_peak()
            self._change_size(entry, 0)


_STATES = ("parameters", "optimizer", HOST)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or this rank's part of a distributed one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    for argument in args:
        if isinstance(argument, dist.ProcessGroup):
            return argument
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except RuntimeError:  # the reduction op is also such an object
                continue
    return None


def _as(answer: float, tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bool:
        return bool(answer)
    return float(answer) if tensor.dtype.is_floating_point else int(answer)


@contextmanager
def named_refusals(seen: LiveStorages) -> Iterator[None]:
    """Raise an error that names the operation that cannot be traced without values."""
    try:
        yield
    except CANNOT_FOLLOW as error:
        where = f"in {seen.lost_in}" if seen.lost_in else "outside its modules"
        raise Impossible(
            f"this model cannot be traced without values: {where}, {seen.stages.now.phase}",
            why=f"{_operation(error)} depends on tensor values, or its output shape is unknown",
            fix="remove .item(), nonzero() and similar calls from the forward pass; or measure "
            "with real steps: muster plan --find-batch-size on the hardware itself",
        ) from error


def _operation(error: BaseException) -> str:
    name = str(getattr(error, "func", None) or (error.args[0] if error.args else error))
    if READ_VALUE.overloadpacket.__name__ in name:
        return f"{name} (.item(), float() or an if)"
    return name


class Taken(NamedTuple):
    """The memory of tensors."""

    live_bytes: int  # now
    peak_bytes: int  # since the last reading


Look: TypeAlias = Callable[[], Taken]


@contextmanager
def tensor_memory(device: torch.device, seen: LiveStorages | None = None) -> Iterator[Look]:
    """Yield a function that returns the device memory of tensors.

    An accelerator's allocator has counters. On the CPU every storage that is created or used inside
    the ``with`` is tracked, by ``seen``, which is slow.
    """
    if device.type != "cpu":
        yield lambda: _of_accelerator(device)
        return
    seen = seen or LiveStorages(on_host=True)

    def read() -> Taken:
        seen.note_peak()
        peak_bytes = max(level.total_bytes for level in seen.peaks.values())
        seen.begin_step()
        return Taken(live_bytes=seen.live_bytes, peak_bytes=peak_bytes)

    with seen.followed():
        yield read


def _of_accelerator(device: torch.device) -> Taken:
    taken = Taken(
        live_bytes=int(torch.accelerator.memory_allocated(device)),
        peak_bytes=int(torch.accelerator.max_memory_allocated(device)),
    )
    torch.accelerator.reset_peak_memory_stats(device)
    return taken
