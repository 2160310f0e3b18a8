"""One checkpoint file of all ranks: rank 0 writes and reads it, and the others wait, hear and receive.

Every function here is a collective. Only rank 0 needs to see the file, so machines need no shared disk,
and all ranks hold the same afterwards. What goes wrong on rank 0 is raised on every rank.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.agreement import tell_all
from torchmuster.train.legacy import one_file
from torchmuster.train.legacy.one_file import Parts, Tree
from torchmuster.train.world import World

T = TypeVar("T")


def write(path: Path, tree: Tree, world: World) -> None:
    """Write rank 0's tree; when this returns on any rank, the file is whole."""
    _by_first(lambda: one_file.write(path, tree), world)


def read(path: Path, world: World) -> Tree:
    """Read the file on rank 0 and return what it holds on all ranks, tensors on the CPU."""
    parts = _by_first(lambda: one_file.read_parts(path), world)
    return one_file.joined(_shared(parts, world), path)


def _shared(parts: Parts | None, world: World) -> Parts:
    """Give rank 0's parts to all: what JSON can say first, then one tensor after the other."""
    outline = parts and {
        "rest": parts.rest,
        "tensors": [
            [name, str(one.dtype).removeprefix("torch."), list(one.shape)]
            for name, one in parts.tensors.items()
        ],
    }
    outline = tell_all(outline, world)[0]
    tensors = {}
    for name, kind, shape in outline["tensors"]:
        if parts is not None:
            tensor = parts.tensors[name].to(world.device)
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, kind), device=world.device)
        if world.world_size > 1:
            dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor, src=0)
        tensors[name] = tensor.cpu()
    return Parts(rest=outline["rest"], tensors=tensors)


def _by_first(act: Callable[[], T], world: World) -> T | None:
    """Let rank 0 do something; a refusal or failure of its becomes everyone's."""
    done, failure = None, None
    if world.is_first:
        try:
            done = act()
        except MusterError as error:
            failure = error
    told = tell_all(failure and [failure.what, failure.why, failure.fix], world)[0]
    if failure is not None:
        raise failure
    if told is not None:
        what, why, fix = told
        raise Impossible(what, why=why, fix=fix)
    return done
