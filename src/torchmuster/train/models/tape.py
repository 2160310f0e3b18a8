"""A tape of the operations that made tensors without memory, to be played again where there is memory.

While a tape records, tensors are made on the meta device. It notes every operation that wrote into a
storage; reads and writes are known by storage, so views need no notes. Playing a tensor runs only the operations
that its storage depends on. Each operation that draws random numbers has a seed of its own, made from the
seed asked for and its place among all draws: whatever else is played, its numbers are the same.
"""

import bisect
import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchmuster.errors import Impossible
from torchmuster.train.torch_private import (
    arguments_of,
    negated_view,
    storage_id,
    tree_leaves,
    tree_map_only,
)

_aten = torch.ops.aten
# Memory that nobody has written to is zero when it is played: the same on every rank.
_ONLY_MAKE_ROOM = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# What was in the memory before does not matter to these.
_OVERWRITE = frozenset(
    ["normal_", "uniform_", "random_", "exponential_", "bernoulli_", "zero_", "fill_", "copy_"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A tensor as a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    call: Any
    args: tuple[Any, ...]  # tensors as windows; constants as real tensors
    kwargs: dict[str, Any]
    results: tuple[Window, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    default_dtype: torch.dtype
    draw: int | None  # its place among the operations that draw random numbers


@dataclass(slots=True)
class Tape:
    """What was recorded."""

    operations: list[_Operation] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)  # storage -> places of operations
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)  # address of a storage -> its number
    _foreign: set[int] = field(default_factory=set)  # storages that were there before
    _draws: int = 0

    def window(self, tensor: torch.Tensor) -> Window:
        """Return the place of a meta tensor in the storages of this tape."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage_id(storage))
        if number is None:
            number = self._numbers[storage_id(storage)] = len(self.storages)
            self.storages.append(storage)  # kept alive, so that its address stays its own
        return Window(
            storage=number,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            conjugate=tensor.is_conj(),
            negative=tensor.is_neg(),
        )

    def knows(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor was made while this tape recorded."""
        number = self._numbers.get(storage_id(tensor.untyped_storage()))
        return number is not None and number not in self._foreign

    def note(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation on meta tensors, if it wrote anything."""
        before = len(self.storages)
        read = {self.window(one).storage for one in tensors_in((args, kwargs)) if one.is_meta}
        self._foreign.update(range(before, len(self.storages)))
        results = tuple(self.window(one) for one in tensors_in(result))
        made = {one.storage for one in results} - read
        changed = {
            self.window(one).storage for one in written_by(call, args, kwargs) if one.is_meta
        }
        if not made and not changed:
            return  # a view
        random = torch.Tag.nondeterministic_seeded in call.tags
        if call not in _ONLY_MAKE_ROOM:
            place = len(self.operations)
            for storage in made | changed:
                self.writers.setdefault(storage, []).append(place)
            self.operations.append(
                _Operation(
                    call=call,
                    args=tree_map_only(torch.Tensor, self._kept, args),
                    kwargs=tree_map_only(torch.Tensor, self._kept, kwargs),
                    results=results,
                    reads=frozenset(self._read(call, args, kwargs)),
                    writes=frozenset(made | changed),
                    default_dtype=torch.get_default_dtype(),
                    draw=self._draws if random else None,
                )
            )
        self._draws += random

    def note_draw(
        self, call: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Note a function that fills a tensor with random numbers, as one operation."""
        window = self.window(tensor)
        self.writers.setdefault(window.storage, []).append(len(self.operations))
        self.operations.append(
            _Operation(
                call=call,
                args=(window, *args),
                kwargs=kwargs,
                results=(window,),
                reads=frozenset() if _is_whole(tensor) else frozenset([window.storage]),
                writes=frozenset([window.storage]),
                default_dtype=torch.get_default_dtype(),
                draw=self._draws,
            )
        )
        self._draws += 1

    def _kept(self, tensor: torch.Tensor) -> Any:
        # A constant may be changed later by the code that made it.
        return self.window(tensor) if tensor.is_meta else tensor.detach().clone()

    def _read(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
        """Yield the storages whose content matters to an operation."""
        first = 1 if call.overloadpacket.__name__ in _OVERWRITE and _is_whole(args[0]) else 0
        for one in tensors_in((args[first:], kwargs)):
            if one.is_meta:
                yield self.window(one).storage

    def needed(self, storage: int) -> list[int]:
        """Return the places of the operations that a storage's content depends on, in order."""
        wanted: set[int] = set()
        open_ends = [(storage, len(self.operations))]
        while open_ends:
            storage, before = open_ends.pop()
            if storage in self._foreign:
                raise Impossible(
                    "a tensor without memory was made from one of another model without memory",
                    why="what is built inside one deferred() does not know the values of another",
                    fix="build both inside the same `with deferred():`",
                )
            writers = self.writers.get(storage, [])
            latest = bisect.bisect_left(writers, before) - 1
            if latest >= 0 and (place := writers[latest]) not in wanted:
                wanted.add(place)
                # What changes only a part of a storage reads it too, and so leads to what came before.
                open_ends.extend((one, place) for one in self.operations[place].reads)
        return sorted(wanted)

    def is_random(self, window: Window) -> bool:
        """Say whether a tensor's values depend on random numbers."""
        return any(self.operations[place].draw is not None for place in self.needed(window.storage))

    def play(self, window: Window, device: torch.device, seed: int) -> torch.Tensor:
        """Return the tensor with its values, on a device; the caller's random numbers are untouched."""
        places = self.needed(window.storage)
        last_use: dict[int, int] = {}
        for place in places:
            operation = self.operations[place]
            last_use.update(dict.fromkeys(operation.reads | operation.writes, place))
        memory = _Memory(self, device)
        with torch.no_grad(), _own_random_numbers(device):
            for place in places:
                self._run(self.operations[place], memory, seed)
                for storage in [one for one, last in last_use.items() if last == place]:
                    if storage != window.storage:
                        memory.forget(storage)
        return memory.tensor(window)

    def _run(self, operation: _Operation, memory: "_Memory", seed: int) -> None:
        own_seed = 0
        if operation.draw is not None:
            own_seed = _mixed(seed, operation.draw)
            _seed(own_seed, memory.device)

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Window):
                return memory.tensor(leaf)
            if isinstance(leaf, torch.Tensor):
                return leaf if leaf.ndim == 0 else leaf.to(memory.device)
            if isinstance(leaf, torch.Generator):
                return torch.Generator(memory.device).manual_seed(own_seed)
            return memory.device if isinstance(leaf, torch.device) else leaf

        kinds = (Window, torch.Tensor, torch.Generator, torch.device)
        before = torch.get_default_dtype()
        torch.set_default_dtype(operation.default_dtype)
        try:
            result = operation.call(
                *tree_map_only(kinds, real, operation.args),
                **tree_map_only(kinds, real, operation.kwargs),
            )
        finally:
            torch.set_default_dtype(before)
        for window, tensor in zip(operation.results, tensors_in(result), strict=True):
            memory.keep(window, tensor)


class _Memory:
    """The real storages while a tape is played."""

    def __init__(self, tape: Tape, device: torch.device) -> None:
        self._tape = tape
        self.device = device
        self._real: dict[int, torch.UntypedStorage] = {}

    def tensor(self, window: Window) -> torch.Tensor:
        """Return a tensor over the real storage, which is made of zeros if it is not there yet."""
        storage = self._real.get(window.storage)
        if storage is None:
            size = self._tape.storages[window.storage].nbytes()
            storage = torch.zeros(size, dtype=torch.uint8, device=self.device).untyped_storage()
            self._real[window.storage] = storage
        tensor = torch.empty(0, dtype=window.dtype, device=self.device)
        tensor.set_(storage, window.offset, window.size, window.stride)
        tensor = tensor.conj() if window.conjugate else tensor
        return negated_view(tensor) if window.negative else tensor

    def keep(self, window: Window, tensor: torch.Tensor) -> None:
        """Keep an operation's result, in the layout that the tape knows."""
        if window.storage in self._real:
            return  # an operation in place, or a second view
        storage = tensor.untyped_storage()
        same = tensor.stride() == window.stride and tensor.storage_offset() == window.offset
        if same and storage.nbytes() == self._tape.storages[window.storage].nbytes():
            self._real[window.storage] = storage
        else:
            self.tensor(window).copy_(tensor)

    def forget(self, storage: int) -> None:
        """Give memory back."""
        self._real.pop(storage, None)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Say whether a tensor covers all of its storage."""
    size_bytes = tensor.numel() * tensor.itemsize
    return tensor.is_contiguous() and size_bytes == tensor.untyped_storage().nbytes()


def written_by(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes into."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(arguments_of(call)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results of any shape."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _mixed(seed: int, draw: int) -> int:
    digest = hashlib.blake2b(f"{seed} {draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # a signed 64-bit number, not negative


@contextlib.contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
        return
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    with module.device(index), torch.random.fork_rng(devices=[index], device_type=device.type):
        yield


def _seed(seed: int, device: torch.device) -> None:
    # Not torch.manual_seed: that seeds every device, also those whose state is not put back.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
