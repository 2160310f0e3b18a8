"""Find trained parameters that get no gradient, on all ranks or on some.

DDP ranks would wait for them forever; FSDP ranks would sum gradients of different parameters.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from torchmuster.errors import MusterError
from torchmuster.launch.probes.process_group import group_store
from torchmuster.train.models.parameters import own_name
from torchmuster.train.world import World, all_gather_object, is_simulated

_NAMES_SHOWN = 10
_WAIT_FOR_OTHERS = timedelta(seconds=8)


def refuse_unused_parameters(model: nn.Module, world: World) -> None:
    """Raise with the names of parameters that have no gradient, and the ranks without them."""
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    if names:
        raise _unused(names, _ranks_that_say_so(names, world), world)


def _ranks_that_say_so(names: Sequence[str], world: World) -> list[int]:
    """Send the names missing here to the other ranks, and return the ranks that miss the same.

    The others call this at about the same time, or never, if they wait in their backward.
    """
    if world.world_size == 1 or is_simulated(world):
        return list(range(world.world_size))
    # No collective: a rank that uses these parameters still waits for the others in its backward.
    store = PrefixStore("torchmuster-unused-parameters", group_store())
    text = json.dumps(names)
    store.set(str(world.global_rank), text)
    keys = [str(rank) for rank in range(world.world_size)]
    with suppress(RuntimeError):  # some ranks never call this
        store.wait(keys, _WAIT_FOR_OTHERS)
    return [
        rank
        for rank, key in enumerate(keys)
        if store.check([key]) and store.get(key).decode() == text
    ]


def used_on_some_ranks_only(without_gradient: Sequence[str], world: World) -> MusterError:
    """Return the error that names the parameters with a gradient on some ranks only; all ranks call it.

    Each rank passes the trained parameters that got none.
    """
    ranks_without: dict[str, list[int]] = {}
    for rank, names in enumerate(all_gather_object(list(without_gradient), world)):
        for name in names:
            ranks_without.setdefault(own_name(name), []).append(rank)
    differing = [
        f"{name} (none on {_rank_list(ranks)})"
        for name, ranks in ranks_without.items()
        if len(ranks) < world.world_size
    ]
    return MusterError(
        f"{_count(differing)} got a gradient on some ranks only: {_first_names(differing)}",
        why="fsdp sums the existing gradients over the ranks in order, so it would sum gradients "
        "of different parameters",
        fix="use them on every rank in every step, multiplied by 0 where they are not needed; or "
        "use ddp with find_unused_parameters=True, if a copy fits on each rank",
    )


def _count(names: Sequence[str]) -> str:
    return "a trained parameter" if len(names) == 1 else f"{len(names)} trained parameters"


def _first_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _unused(names: Sequence[str], ranks: Sequence[int], world: World) -> MusterError:
    finding = (
        "set find_unused_parameters=True: ddp then searches for them after every forward pass, "
        "which traverses the whole graph in each step"
    )
    if len(ranks) == world.world_size:
        where = "" if len(ranks) == 1 else " on any rank"
        fix = (
            "remove them from the model or freeze them with requires_grad_(False), which costs "
            f"nothing; or {finding}"
        )
    else:
        where = f" on {_rank_list(ranks)} only"
        fix = (
            "use them on every rank in every step, multiplied by 0 where they are not needed; or "
            f"{finding}"
        )
    return MusterError(
        f"{_count(names)} got no gradient in the first step{where}: {_first_names(names)}",
        why="ddp averages the gradient of every trainable parameter, and ranks would wait forever "
        "for one that never arrives",
        fix=fix,
    )
