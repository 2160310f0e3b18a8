"""Record every storage of a traced run from creation to release, and every operation.

The log is plain: numbers of storages, sizes, stages. ``peak_accounting.py`` evaluates it
afterwards, when the role of each storage is known.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

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
    workspace_bytes,
)
from torchmuster.plan.probes.stages import AllocationLog, Done, Sized, Stage, Stages, Storage
from torchmuster.plan.record import TracedCollective
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

_aten = torch.ops.aten


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record all operations inside the ``with`` :meth:`followed`."""

    def __init__(
        self,
        *,
        answer: Callable[[Stage], float | None],
        on_host: bool,
    ) -> None:
        """Start with an empty log.

        ``answer`` supplies the value of a tensor that is read in a stage; None: it is unknown
        there. ``on_host``: ranks compute on CPUs and communicate over gloo, which uses the same
        memory: a copy of scattered or gathered tensors, and the random states that recomputing
        keeps.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = AllocationLog()
        self.stages = Stages(self.log.events.append)
        self._answer = answer
        self._on_host = on_host
        self._numbers: dict[int, int] = {}  # by a storage's address, while it is live
        self._sizes: dict[int, int] = {}
        self._made_by: dict[int, int | None] = {}  # the operation whose backward created it
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._added_to: tuple[int | None, int] = (
            None,
            0,
        )  # a gradient, and the position of its sum in the log
        self._paused = 0
        self._first = 0  # number of the first storage that was created in a step
        self.lost_in = ""  # the module that could not be traced
        self.copies_group: str | None = (
            None  # name of the group over the copies, in hybrid sharding
        )

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Record all operations inside the ``with``."""
        self._first = len(self.log.storages)
        resize, random_state = torch.UntypedStorage.resize_, torch.get_rng_state

        def kept() -> torch.Tensor:
            state = random_state()  # created in C++, where no mode sees it
            if self._on_host:
                self._see_tensor(state, "get_rng_state")
            return state

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)  # FSDP frees blocks with this
            number = self.see(storage, "resize_")
            self.log.storages[number].collective = True
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        torch.get_rng_state = kept
        try:
            with paused_in_sharding_propagation(self.pause, self.go_on), self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            torch.get_rng_state = random_state

    def pause(self) -> None:
        """Record nothing until :meth:`go_on`."""
        self._paused += 1

    def go_on(self) -> None:
        """Record again."""
        self._paused -= 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its local tensors are dispatched again
        if func is READ_VALUE and not self._paused:
            answer = self._answer(self.stages.now)
            if answer is not None:
                return _as(answer, args[0])
        if self._paused:
            return func(*args, **kwargs)
        self._added_to = None, 0
        if func is torch.ops.prim.device.default:  # the most frequent call
            self._see_tensor(args[0], "")
            return func(*args, **kwargs)
        if four_bit.is_product(func):  # its kernel has large temporary tensors
            with self:
                return four_bit.product(*args, **kwargs)
        given = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        for one in given:  # storages created in C++, which no mode sees
            self._see_tensor(one, "")
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, given)
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if func is ATTENTION_BACKWARD and not self._on_host:
            self._take_for_a_moment(room_of_attention_backward(args[1], args[2]), name)
        known = len(self.log.storages)
        try:
            result = func(*args, **kwargs)
        except CANNOT_FOLLOW:
            self.lost_in = (
                self.lost_in or self.stages.module
            )  # hooks leave the module before it is recorded
            raise
        result = with_kept_statistics(func, args, result, on_host=self._on_host)
        if func is _aten.add.Tensor and self._adds_gradients(*args[:2]):
            self._added_to = self._see_tensor(args[0], name), len(self.log.events)
        made = tensors_in((result,))
        numbers = [self._see_tensor(one, name) for one in made]
        flops = flops_of(func, args, kwargs, result)
        if self._on_host:
            taken = workspace_bytes(func, args, kwargs, flops=flops, made=result)
            if taken:
                self._take_for_a_moment(taken, name)
        if func.namespace == "fsdp" and func.overloadpacket.__name__ == "all_gather_copy_in":
            of_states = (self._see_tensor(one, name) for one in given)
            for number in (*numbers, *(one for one in of_states if self._is_new(one))):
                self._is_for_collective(number, "gather")
        moved = moved_bytes_of(func, args, kwargs, given=given, made=made)
        if moved or flops:
            self.log.events.append(
                Done(
                    name=name,
                    dtype=_live_storage_dtype(made or given),
                    flops=flops,
                    moved_bytes=moved,
                    made_bytes=sum(
                        one.numel() * one.itemsize
                        for one, number in zip(made, numbers, strict=True)
                        if number is not None and number >= known
                    ),
                    recomputed=self._is_recomputing(),
                )
            )
        return result

    def _adds_gradients(self, first: Any, second: Any) -> bool:
        """Return whether a backward adds up several gradients of one tensor, possibly in place.

        An operation's own operand is created by it, or kept until it has finished. A view, such as
        the gradient of a transposed matrix, keeps its base alive, so torch adds in a new tensor.
        """
        if torch.is_grad_enabled() or not computing_backward() or base_of(first) is not first:
            return False
        numbers = [
            self._see_tensor(one, "") for one in (first, second) if isinstance(one, torch.Tensor)
        ]
        if len(set(numbers)) < 2 or numbers[0] is None:
            return False
        return self._made_by.get(numbers[0]) != backward_under_way()

    def _is_recomputing(self) -> bool:
        # A backward runs without gradients; a forward that is recomputed in it runs with them.
        return torch.is_grad_enabled() and computing_backward()

    def _collective(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        name = func.overloadpacket.__name__
        kind = _KINDS.get(name)
        group = _group(args)
        if kind is None or group is None:
            return func(*args, **kwargs)
        # The first tensors are the outputs; the largest is the whole of what is moved.
        whole = max(given, key=lambda one: one.numel() * one.itemsize)
        for one in given:
            self._is_for_collective(
                self._see_tensor(one, name),
                "reduce" if kind == "reduce_scatter" and one is given[0] else None,
            )
        self.note_collective(kind, whole, group.size(), group.group_name)
        if self._on_host and kind in ("reduce_scatter", "all_gather"):
            copied = self._take_for_a_moment(whole.numel() * whole.itemsize, f"c10d.{kind}")
            self.log.storages[copied].collective = True
        return func(*args, **kwargs)

    def _take_for_a_moment(self, size_bytes: int, operation: str) -> int:
        """Record memory that an operation allocates and frees itself."""
        number = len(self.log.storages)
        self.log.storages.append(Storage(made_in=self.stages.now))
        self._note_size(number, size_bytes, operation)
        self._note_size(number, 0, operation)
        return number

    def _is_new(self, number: int | None) -> bool:
        """Return whether a storage was created in a step and does not belong to the model."""
        return number is not None and number >= self._first

    def note_collective(
        self, kind: Any, whole: torch.Tensor, ranks: int, group_name: str | None = None
    ) -> None:
        """Record the start of a collective."""
        self.log.events.append(
            TracedCollective(
                kind=kind,
                ranks=ranks,
                between_copies=group_name is not None and group_name == self.copies_group,
                moved_bytes=whole.numel() * whole.itemsize,
                dtype=str(whole.dtype).removeprefix("torch."),
            )
        )

    def _is_for_collective(
        self, number: int | None, stream: Literal["compute", "gather", "reduce"] | None
    ) -> None:
        if number is not None:
            storage = self.log.storages[number]
            storage.collective = True
            storage.stream = stream or storage.stream

    def _see_tensor(self, tensor: torch.Tensor, operation: str) -> int | None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            return None
        return self.see(local.untyped_storage(), operation)

    def see(self, storage: torch.UntypedStorage, operation: str) -> int:
        """Record a storage with its current size; return its number."""
        key = storage_id(storage)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.log.storages)
            self.log.storages.append(
                Storage(made_in=self.stages.now, recomputed=self._is_recomputing())
            )
            self._made_by[number] = backward_under_way()
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        size = storage.nbytes()
        if size != self._sizes.get(number, 0):
            self._note_size(number, size, operation)
        return number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it was never recorded."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return self._numbers.get(storage_id(local.untyped_storage()))

    def _note_size(self, number: int, size_bytes: int, operation: str) -> None:
        self._sizes[number] = size_bytes
        self.log.events.append(Sized(number, size_bytes, operation, self.stages.module))

    def _forget(self, key: int) -> None:
        number = self._numbers.pop(key)
        del self._references[key]
        del self._made_by[number]
        if not self._sizes.pop(number, 0):
            return
        added_to, summed_at = self._added_to
        # torch adds to an unshared gradient in place. With an active dispatch mode it creates a new
        # tensor instead, and frees the old one at once.
        place = summed_at if number == added_to else len(self.log.events)
        self.log.events.insert(place, Sized(number, 0, "", ""))


_KINDS = {
    ALL_GATHER: "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
}


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    for one in args:
        if isinstance(one, dist.ProcessGroup):
            return one
        if isinstance(one, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(one)
            except RuntimeError:  # the reduction op is also such an object
                continue
    return None


def _as(answer: float, tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bool:
        return bool(answer)
    return float(answer) if tensor.dtype.is_floating_point else int(answer)


def _live_storage_dtype(tensors: list[torch.Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


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
            fix="plan with an estimate, which has a wider band; or remove .item(), nonzero() and "
            "similar calls from the forward pass",
        ) from error


def _operation(error: BaseException) -> str:
    named = str(getattr(error, "func", None) or (error.args[0] if error.args else error))
    return (
        f"{named} (.item(), float() or an if)"
        if READ_VALUE.overloadpacket.__name__ in named
        else named
    )


class Taken(NamedTuple):
    """The memory of tensors."""

    live_bytes: int  # now
    peak_bytes: int  # since the last reading


Look: TypeAlias = Callable[[], Taken]


@contextmanager
def tensor_memory(device: torch.device) -> Iterator[Look]:
    """Yield a function that returns the device memory of tensors.

    An accelerator's allocator has counters. On the CPU every storage that is created or used inside
    the ``with`` is tracked, which is slow.
    """
    if device.type != "cpu":
        yield lambda: _of_accelerator(device)
        return
    seen = LiveStorages(answer=lambda _: None, on_host=True)
    followed = _OfHost(seen)
    with seen.followed():
        yield followed.look


def _of_accelerator(device: torch.device) -> Taken:
    taken = Taken(
        live_bytes=int(torch.accelerator.memory_allocated(device)),
        peak_bytes=int(torch.accelerator.max_memory_allocated(device)),
    )
    torch.accelerator.reset_peak_memory_stats(device)
    return taken


class _OfHost:
    """Sum up the log of storages between readings."""

    def __init__(self, seen: LiveStorages) -> None:
        self._seen = seen
        self._sizes: dict[int, int] = {}
        self._begin = 0

    def look(self) -> Taken:
        """Update the live bytes from the log."""
        total = peak = sum(self._sizes.values())
        events = self._seen.log.events
        end = len(events)
        for event in events[self._begin : end]:
            if isinstance(event, Sized):
                total += event.size_bytes - self._sizes.pop(event.number, 0)
                peak = max(peak, total)
                if event.size_bytes:
                    self._sizes[event.number] = event.size_bytes
        self._begin = end
        return Taken(live_bytes=total, peak_bytes=peak)
