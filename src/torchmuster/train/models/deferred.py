"""A model that is built without memory and gets its values later, shard by shard.

::

    with deferred():
        model = build()
    fully_shard(model)                               # or nothing, or DDP afterwards
    materialise(model, device=world.device, seed=0)

Every parameter has the values that the model's own code gives it, from random numbers that depend on the
seed alone: they are the same for any number of ranks and however the model is spread. No rank ever has more
than one parameter whole, beside what that one was made from.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as hooks

from torchmuster.errors import Impossible
from torchmuster.train.models.recording import recorded
from torchmuster.train.models.tape import Tape, Window
from torchmuster.train.torch_private import (
    REGISTERED,
    compute_local_shape_and_global_offset,
    parameters_and_buffers,
)

Part = tuple[slice, ...]


class Source(Protocol):
    """Where a tensor's values come from."""

    def values(self, part: Part, *, device: torch.device, seed: int) -> torch.Tensor:
        """Return the values of a part of the tensor."""
        ...


@dataclass(frozen=True, slots=True)
class _FromTape:
    tape: Tape
    window: Window

    def values(self, part: Part, *, device: torch.device, seed: int) -> torch.Tensor:
        return self.tape.play(self.window, device, seed)[part]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module keeps a tensor."""

    name: str
    tensor: torch.Tensor
    put: Callable[[Any], None]  # another one there
    in_container: bool = False


# By the module that holds a tensor: sharding replaces parameters by others, but not their modules.
_sources: "WeakKeyDictionary[nn.Module, dict[str, Source]]" = WeakKeyDictionary()


@contextmanager
def deferred() -> Iterator[None]:
    """Build models without memory inside the ``with``; ``materialise`` gives them their values.

    What Python and numpy draw inside is a constant to the model: the same on all ranks, whatever was drawn
    before. After the ``with`` they go on as if nothing had been drawn.
    """
    tape = Tape()
    holders: dict[int, nn.Module] = {}

    def seen(module: nn.Module, name: str, member: Any) -> None:
        holders[id(module)] = module

    with ExitStack() as stack:
        stack.callback(hooks.register_module_parameter_registration_hook(seen).remove)
        stack.callback(hooks.register_module_buffer_registration_hook(seen).remove)
        stack.callback(hooks.register_module_module_registration_hook(seen).remove)
        stack.enter_context(_seeded_alike())
        stack.enter_context(recorded(tape))
        yield
    # Copies of modules are seen only as members of others.
    modules = {id(one): one for holder in holders.values() for one in holder.modules()}
    for module in modules.values():
        for place in _own_tensors(module):
            if place.tensor.is_meta and tape.knows(place.tensor):
                source = _FromTape(tape, tape.window(place.tensor))
                _sources.setdefault(module, {})[place.name] = source


@contextmanager
def _seeded_alike() -> Iterator[None]:
    """Let Python and numpy, where it is in use, draw the same on all ranks; afterwards they go on as before."""
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    random.seed(0)
    if numpy:
        numpy.random.seed(0)
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)


def is_deferred(model: nn.Module) -> bool:
    """Say whether any part of a model is still without memory."""
    return any(one.tensor.is_meta for module in model.modules() for one in _own_tensors(module))


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a deferred model, whose values come from where those of the first do."""
    copy = deepcopy(model)
    for one, same in zip(model.modules(), copy.modules(), strict=True):
        if one in _sources:
            _sources[same] = dict(_sources[one])
    return copy


def take_values_from(model: nn.Module, sources: Mapping[str, Source]) -> None:
    """Let ``materialise`` take the values of these names from elsewhere than from the model's code."""
    by_tensor = {
        id(tensor): sources[name]
        for tensor, names in _names(model)
        for name in names
        if name in sources
    }
    for module in model.modules():
        for place in _own_tensors(module):
            if id(place.tensor) in by_tensor:
                _sources.setdefault(module, {})[place.name] = by_tensor[id(place.tensor)]


def materialise(model: nn.Module, *, device: torch.device, seed: int) -> None:
    """Give a deferred model its values, in place: this rank's shards where it is sharded.

    All ranks do this with the same seed, without communication. What has its values already is only
    moved to the device.
    """
    names = {id(tensor): found[0] for tensor, found in _names(model)}
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what is tied is made once
    with torch.no_grad():
        for module in model.modules():
            sources = _sources.pop(module, {})
            for place in list(_own_tensors(module)):
                tensor = place.tensor
                if not tensor.is_meta and place.name not in sources:
                    continue
                if id(tensor) not in done:
                    source = sources.get(place.name)
                    if source is None:
                        raise _unknown(names[id(tensor)])
                    done[id(tensor)] = tensor, _made(tensor, source, device, seed)
                place.put(done[id(tensor)][1])
        for module in model.modules():
            for place in list(_parameters_in_containers(module)):
                if id(place.tensor) in done:
                    place.put(done[id(place.tensor)][1])
    model.to(device)  # FSDP notices by this that its shards are others
    _refuse_what_sharding_left(model)


def move_all_but_parameters(model: nn.Module, device: torch.device) -> None:
    """Move buffers and a module's other tensors to a device, in place."""
    for module in model.modules():
        for place in list(_own_tensors(module)):
            if not isinstance(place.tensor, nn.Parameter):
                place.put(place.tensor.to(device))


def _own_tensors(module: nn.Module) -> Iterator[_Place]:
    """Yield the tensors a module holds itself; of those in lists and dictionaries none that is a parameter.

    A parameter in a list is another module's, or registered as well.
    """
    for place in _places(module):
        if not (place.in_container and isinstance(place.tensor, nn.Parameter)):
            yield place


def _parameters_in_containers(module: nn.Module) -> Iterator[_Place]:
    for place in _places(module):
        if place.in_container and isinstance(place.tensor, nn.Parameter):
            yield place


def _places(module: nn.Module) -> Iterator[_Place]:
    others = {name: one for name, one in vars(module).items() if name not in REGISTERED}
    holders: tuple[dict[str, Any], ...] = (*parameters_and_buffers(module), vars(module))
    for holder, members in zip(holders, (*holders[:2], others), strict=True):
        for name, value in members.items():
            put = partial(holder.__setitem__, name)
            if isinstance(value, torch.Tensor):
                yield _Place(name, value, put)
            else:
                yield from _in_container(name, value, put, frozenset())


def _in_container(
    name: str, container: Any, put: Callable[[Any], None], around: frozenset[int]
) -> Iterator[_Place]:
    """Yield the tensors in lists, tuples and dictionaries, however deep."""
    if id(container) in around:  # it contains itself
        return
    put_at: Callable[[Any, Any], None]
    if isinstance(container, dict):
        items, put_at = list(container.items()), container.__setitem__
    elif isinstance(container, list):
        items, put_at = list(enumerate(container)), container.__setitem__
    elif isinstance(container, tuple):
        items = list(enumerate(container))
        changed = list(container)

        def put_at(
            key: Any, value: Any
        ) -> None:  # a tuple is made anew, with all that was put so far
            changed[key] = value
            named = hasattr(container, "_fields")
            put(type(container)(*changed) if named else type(container)(changed))
    else:
        return
    for key, value in items:
        put_here = partial(put_at, key)
        if isinstance(value, torch.Tensor):
            yield _Place(f"{name}.{key}", value, put_here, in_container=True)
        else:
            yield from _in_container(f"{name}.{key}", value, put_here, around | {id(container)})


def _names(model: nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Return every tensor with all its names; a tied one has several."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for prefix, module in model.named_modules():
        for place in _own_tensors(module):
            full_name = f"{prefix}.{place.name}" if prefix else place.name
            found.setdefault(id(place.tensor), (place.tensor, []))[1].append(full_name)
    return list(found.values())


def _part(tensor: torch.Tensor) -> Part:
    """Return this rank's part of a tensor: all of it, unless it is sharded."""
    sizes: tuple[int, ...] = tuple(tensor.shape)
    offsets: tuple[int, ...] = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return tuple(slice(begin, begin + size) for size, begin in zip(sizes, offsets, strict=True))


def _made(tensor: torch.Tensor, source: Source, device: torch.device, seed: int) -> torch.Tensor:
    """Return a tensor with the values of a rank's part, of the kind that stood for them."""
    made = source.values(_part(tensor), device=device, seed=seed)
    made = made.to(device=device, dtype=tensor.dtype)
    own_bytes = made.numel() * made.itemsize
    if not made.is_contiguous() or made.untyped_storage().nbytes() != own_bytes:
        # A copy, so that the memory of the whole can be given back.
        made = made.clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, DTensor):
        made = DTensor.from_local(
            made,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))  # what others have noted on it, as transformers does
    return made


def _unknown(name: str) -> Impossible:
    return Impossible(
        f"{name} has no memory, and nothing is known of its values",
        why="it was made on the meta device outside of deferred()",
        fix="build the whole model inside `with deferred():`",
    )


def _refuse_what_sharding_left(model: nn.Module) -> None:
    """Raise for a parameter in a list that is not the model's own any more: it will never have values."""
    for prefix, module in model.named_modules():
        for place in _parameters_in_containers(module):
            if place.tensor.is_meta:
                name = f"{prefix}.{place.name}" if prefix else place.name
                raise Impossible(
                    f"{name} has no memory, and will have none",
                    why="it is a parameter in a list or dictionary, and sharding put another in its place",
                    fix="take the parameter from its module where it is used, or use nn.ParameterList or "
                    "nn.ParameterDict",
                )
