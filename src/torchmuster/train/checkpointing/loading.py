"""Reading a checkpoint into the tensors of a training that is already laid out over its ranks."""

import json
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torchmuster.checkpoints.index import INDEX, Index
from torchmuster.checkpoints.index import MOST_BYTES as MOST_INDEX_BYTES
from torchmuster.checkpoints.store import Store, read_small
from torchmuster.checkpoints.verify import Found
from torchmuster.errors import MusterError
from torchmuster.train.checkpointing.choosing import for_all
from torchmuster.train.checkpointing.fitting import never_stepped, refuse_another
from torchmuster.train.checkpointing.reader import Reader
from torchmuster.train.checkpointing.tree import put_together, same_memory, taken_apart
from torchmuster.train.checkpointing.writer import STATE, own_file
from torchmuster.train.world import World

_MOST_STATE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Read:
    """A state, and what is this rank's own; None if it was saved by another number of ranks."""

    state: dict[str, Any]
    own: dict[str, Any] | None


def read_into(
    store: Store, found: Found, state: dict[str, Any], world: World, group: dist.ProcessGroup
) -> Read:
    """Read a verified checkpoint; what is not of this training is refused before anything is changed."""
    name = found.name
    tensors = taken_apart(state)[1]
    common: list[Any] = []

    def read_common() -> None:
        index = Index.from_json(read_small(store, name, INDEX, most_bytes=MOST_INDEX_BYTES))
        common.extend((index, _json(store, name, STATE)))
        if found.manifest.world_size == world.world_size:
            common.append(_json(store, name, own_file(world.global_rank)))

    for_all(read_common, world, group)
    index, rest, own = (*common, None)[:3]
    saved = {one: one for one in index.tensors} | dict(index.tied)
    try:
        never = never_stepped(rest, taken_apart(state)[0])
        tensors = {one: tensor for one, tensor in tensors.items() if not one.startswith(never)}
        refuse_another(name, index, tensors, saved=saved)
        once = same_memory(tensors)
        state_dict_loader.load(
            {one: tensor for one, tensor in tensors.items() if one not in once},
            storage_reader=Reader(store, name, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
        return Read(state=put_together(rest, tensors), own=own)
    except CheckpointException as error:  # which is not an Exception
        rank, (first, _) = sorted(error.failures.items())[0]
        raise MusterError(f"rank {rank} could not read {name}", why=str(first)) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise MusterError(
            f"{STATE} of {name} is not the state of a training",
            why=f"{type(error).__name__}: {error}",
        ) from None


def _json(store: Store, name: str, file: str) -> Any:
    try:
        return json.loads(read_small(store, name, file, most_bytes=_MOST_STATE_BYTES))
    except RecursionError:
        raise ValueError(f"{file} cannot be read") from None
