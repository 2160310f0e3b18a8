"""Check every N steps, by a digest of the bits, that replicas still have the same weights.

It compares parameters: whole ones over all ranks, sharded ones over the replicas of the same shard
(hybrid). It ignores buffers: in DDP, running statistics differ between ranks until the next forward
broadcasts rank 0's.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.finding import Finding, Status
from torchmuster.train.weights import own_name
from torchmuster.train.world import World, all_gather_object

_PIECE = 2**22  # elements at a time: the computation takes eight bytes for each
_ODD = 0x1E3779B97F4A7C15  # to mix bits with; sums and products wrap at 64 bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Divergence:
    """Compares the ranks' weights with a few small operations and one collective."""

    def __init__(self, model: nn.Module, world: World, *, every_steps: int = 100) -> None:
        self._world = world
        self._every_steps = every_steps
        self._same_up_to: int | None = None
        # Names and parameters by the ranks that hold replicas (None: all).
        self._replicated: dict[dist.ProcessGroup | None, list[tuple[str, nn.Parameter]]] = (
            defaultdict(list)
        )
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                self._replicated[None].append((own_name(name), parameter))
            elif (group := _replicas(parameter)) is not None:
                self._replicated[group].append((own_name(name), parameter))

    def check(self, step_number: int) -> Finding | None:
        """Compare if due; return a failure, equal on every rank, if weights differ, else None."""
        if self._world.world_size == 1 or step_number % self._every_steps:
            return None
        differing, digests = [], {}
        for group, members in self._replicated.items():
            own = weights_digest([parameter for _, parameter in members]).to(self._world.device)
            # The maximum of ~own gives the minimum of own, without a second call.
            most = torch.cat((own, ~own))
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            highest, lowest = most.chunk(2)
            for place in (highest != ~lowest).nonzero().flatten().tolist():
                differing.append(members[place][0])
                digests[members[place][0]] = int(own[place])
        said = all_gather_object({"differing": differing, "digests": digests}, self._world)
        first = next((one["differing"][0] for one in said if one["differing"]), None)
        if first is None:
            self._same_up_to = step_number
            return None
        return self._verdict(step_number, first, [one["digests"] for one in said])

    def _verdict(self, step: int, first: str, of_ranks: list[dict[str, int]]) -> Finding:
        alike: dict[int, list[int]] = defaultdict(list)
        for rank, digests in enumerate(of_ranks):
            if first in digests:
                alike[digests[first]].append(rank)
        parts = [
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            for ranks in alike.values()
        ]
        count = len({name for digests in of_ranks for name in digests})
        since = (
            "they may have differed from the start, because this is the first comparison"
            if self._same_up_to is None
            else f"they were equal at step {self._same_up_to}"
        )
        return Finding(
            name="weights-differ",
            status=Status.FAILURE,
            what=f"the ranks' weights differ at step {step}: first {first}"
            + (f", and {count - 1} more" if count > 1 else ""),
            why=f"{' against '.join(parts)}; {since}",
            fix="look for a difference between ranks: weights changed outside the optimizer, "
            "another "
            "seed or version, an optimizer step that some ranks skip, a faulty device; "
            "resume from an earlier checkpoint",
        )


def weights_digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one integer for each tensor's bits, on its device: a position-weighted sum."""
    own = []
    weights: dict[torch.device, torch.Tensor] = {}
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            bits = local.detach().contiguous().view(_INTEGERS[local.element_size()]).flatten()
            if local.device not in weights:
                most = max(one.numel() for one in tensors)
                weights[local.device] = _divergence_weights(min(most, _PIECE), local.device)
            total = torch.zeros((), dtype=torch.int64, device=local.device)
            for piece in torch.split(bits, _PIECE):
                total = total * _ODD + (piece * weights[local.device][: len(piece)]).sum()
            own.append(total)
    return torch.stack(own)


def _divergence_weights(count: int, device: torch.device) -> torch.Tensor:
    """Return a weight for each position, so that reordered values give another sum."""
    places = torch.arange(1, count + 1, device=device) * _ODD
    return places ^ (places >> 29)


def _replicas(parameter: DTensor) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shard; None if every rank has its own."""
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            return parameter.device_mesh.get_group(dimension)
    return None
