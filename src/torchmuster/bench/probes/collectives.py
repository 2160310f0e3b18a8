"""A rank that times messages with the others, and checks every received value.

As a program: ``python -m torchmuster.bench.probes.collectives REQUEST ANSWERS``: a file or JSON,
and a folder or ``-`` for standard output. Operations are the PyTorch calls on whole tensors; a
sample has several calls in a row, as in nccl-tests.
"""

import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from torchmuster.bench.collectives import (
    TO_OUTPUT,
    CollectivesRequest,
    CollectiveTimes,
    Timed,
    print_answer,
)
from torchmuster.bench.probes.clock import interleaved_on_ranks
from torchmuster.diagnose.probes.exact_values import (
    compare_values,
    exact_numbers,
    exact_sums,
    forget_groups,
    wait_for_device,
)
from torchmuster.diagnose.rank_record import Values
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.train.world import World, join_world

_ITEM_BYTES = 4  # float32, whose sums of small whole numbers are exact
# Ranks leave a barrier one after the other; with few calls, this distorts the time.
_LEAST_CALLS = 4
# Newer names if torch has them: the older ones warn in every process.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Messages:
    """All kinds of messages of all sizes, over the same two buffers."""

    def __init__(self, world: World, largest_bytes: int) -> None:
        self._world = world
        count = largest_bytes // _ITEM_BYTES
        # Written to, so that the pages are allocated; zeros, so that repeated sums stay the same.
        self._mine = torch.ones(count, device=world.device).zero_()
        self._got = torch.ones(count, device=world.device).zero_()

    def call(self, operation: str, size_bytes: int) -> Callable[[], object]:
        """Return the call that sends messages of a size, which :func:`rounded` gave."""
        ranks = self._world.world_size
        whole = size_bytes // _ITEM_BYTES
        part = whole // ranks
        mine, got = self._mine, self._got
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": partial(dist.all_reduce, got[:whole]),
            "all-gather": partial(_gather, got[:whole], mine[:part]),
            "reduce-scatter": partial(_scatter, got[:part], mine[:whole]),
            "all-to-all": partial(dist.all_to_all_single, got[:whole], mine[:whole]),
            "send-receive": self._passing_on(mine[:whole], got[:whole]),
        }
        return calls[operation]

    def _passing_on(self, mine: torch.Tensor, got: torch.Tensor) -> Callable[[], object]:
        """Return the call that sends to the next and receives from the previous rank at once."""
        rank, ranks = self._world.global_rank, self._world.world_size
        both = [
            dist.P2POp(dist.isend, mine, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, got, (rank - 1) % ranks),
        ]

        def pass_on() -> None:
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return pass_on

    def checked(self, operation: str, size_bytes: int, turn: int) -> Values:
        """Send known values, and compare all received values."""
        ranks, rank, device = self._world.world_size, self._world.global_rank, self._world.device
        whole = size_bytes // _ITEM_BYTES
        part = whole // ranks
        contributed = part if operation == "all-gather" else whole
        self._got[:whole].zero_()
        (self._got if operation == "all-reduce" else self._mine)[:contributed] = exact_numbers(
            rank, contributed, turn, device
        )
        self.call(operation, size_bytes)()
        wait_for_device(device)
        found = Values()
        for got, expected in self._pieces(operation, whole, turn):
            found = found + compare_values(got, expected)
        self._got.zero_()
        self._mine.zero_()
        return found

    def _pieces(
        self, operation: str, whole: int, turn: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the received and the expected values."""
        ranks, rank, device = self._world.world_size, self._world.global_rank, self._world.device
        part = whole // ranks
        own = slice(rank * part, (rank + 1) * part)
        got = self._got
        if operation == "all-reduce":
            yield got[:whole], exact_sums(ranks, whole, turn, device)
        elif operation == "reduce-scatter":
            yield got[:part], exact_sums(ranks, whole, turn, device)[own]
        elif operation == "send-receive":
            yield got[:whole], exact_numbers((rank - 1) % ranks, whole, turn, device)
        else:
            for other in range(ranks):
                piece = got[other * part : (other + 1) * part]
                if operation == "all-gather":
                    yield piece, exact_numbers(other, part, turn, device)
                else:
                    yield piece, exact_numbers(other, whole, turn, device)[own]


def rounded(size_bytes: int, ranks: int) -> int:
    """Return a size that the ranks can share evenly, as nccl-tests rounds it: down."""
    each = _ITEM_BYTES * ranks
    return size_bytes // each * each


def collective_times(asked: CollectivesRequest, world: World) -> CollectiveTimes:
    """Check and time all messages; all ranks do."""
    sizes = sorted({rounded(size, world.world_size) for size in asked.sizes_bytes})
    kinds = [(operation, size) for operation in asked.operations for size in sizes]
    messages = Messages(world, sizes[-1])
    values = {kind: messages.checked(*kind, turn=1) for kind in kinds}
    turns = {f"{kind[0]} {kind[1]}": messages.call(*kind) for kind in kinds}
    taken_s = interleaved_on_ranks(
        turns,
        world=world,
        rounds=asked.rounds,
        least_sample_s=asked.least_sample_s,
        least_calls=_LEAST_CALLS,
    )
    for kind in kinds:  # check again after the timing
        values[kind] = values[kind] + messages.checked(*kind, turn=2)
    forget_groups()
    return CollectiveTimes(
        rank=world.global_rank,
        host=socket.gethostname(),
        device=str(world.device),
        backend=world.backend,
        timed=tuple(
            Timed(
                operation=kind[0],
                size_bytes=kind[1],
                seconds=taken_s[f"{kind[0]} {kind[1]}"],
                compared=values[kind].compared,
                wrong=values[kind].wrong,
                first_wrong=_first_wrong(values[kind]),
            )
            for kind in kinds
        ),
    )


def _first_wrong(values: Values) -> str:
    if not values.wrong:
        return ""
    got = "NaN" if values.got is None else f"{values.got:g}"
    return f"index {values.place} is {got}, expected {values.expected:g}"


def main(request: str, answers: str) -> None:
    """Read the request, measure, and write the answer."""
    inline = answers == TO_OUTPUT
    asked = msgspec.json.decode(
        request if inline else Path(request).read_bytes(), type=CollectivesRequest
    )
    with join_world("cpu" if asked.device == "cpu" else "auto") as world:
        found = collective_times(asked, world)
        text = msgspec.json.encode(found).decode()
        if inline:
            print_answer(text)
        else:
            leave_answer(answers, found.rank, text)


if __name__ == "__main__":
    main(*sys.argv[1:])
