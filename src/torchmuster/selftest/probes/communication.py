"""Collectives with known results, and a training whose flight recorder is read, on the ranks of a check."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchmuster.diagnose.probes.exact_values import (
    OPERATIONS,
    Prepared,
    Seat,
    compare_values,
    wait_for_device,
)
from torchmuster.launch.hangs.flight_recorder import groups_of, read_flight_record
from torchmuster.launch.rank.stack import dump_flight_record
from torchmuster.selftest.probes.answering import Request, answer_request
from torchmuster.train.world import World

_COUNTS = (2**8, 2**14, 2**20)  # values: 1 KiB, 64 KiB and 4 MiB in float32
_TURNS = 3
_TRAINED_STEPS = 10
_DONE_WITHIN_S = 20.0
_RAS_WITHIN_S = 30.0


def exact_collectives(world: World, request: Request) -> dict[str, Any]:
    """Run each collective with values whose result is known; count the wrong ones of this rank."""
    seat = Seat(rank=world.global_rank, world_size=world.world_size, device=world.device)
    is_wrong = request["planted"] and world.global_rank == 1
    found = {
        name: _compared(prepare, seat, add=float(is_wrong and name == "all-reduce"))
        for name, prepare in OPERATIONS.items()
    }
    if world.device.type != "cpu":
        found["bfloat16 all-reduce"] = _compared(_bfloat16_sum, seat, add=0.0)
    return {"operations": found, "backend": world.backend}


def _compared(
    prepare: Callable[[Seat, int, int], Prepared], seat: Seat, *, add: float
) -> dict[str, float]:
    """Run one collective in several sizes; ``add`` changes one element before the call."""
    compared = wrong = 0
    seconds = 0.0
    for turn in range(_TURNS):
        for count in _COUNTS:
            call, pieces = prepare(seat, count, turn)
            if add:
                _, own, _ = next(pieces())
                own[count // 2] += add
            wait_for_device(seat.device)
            begun = time.perf_counter()
            call()
            wait_for_device(seat.device)
            seconds += time.perf_counter() - begun
            for _, got, expected in pieces():
                values = compare_values(got, expected)
                compared, wrong = compared + values.compared, wrong + values.wrong
    return {"compared": compared, "wrong": wrong, "seconds": seconds}


def _bfloat16_sum(seat: Seat, count: int, turn: int) -> Prepared:
    """Prepare a sum whose partial sums stay below 256, up to which bfloat16 has all integers."""
    pattern = torch.arange(count, device=seat.device) % 7
    got = (pattern + seat.rank % 8 + turn).to(torch.bfloat16)
    ranks = sum(rank % 8 for rank in range(seat.world_size))
    expected = (pattern + turn) * seat.world_size + ranks

    def pieces() -> Any:
        yield None, got, expected.to(torch.bfloat16)

    return lambda: dist.all_reduce(got, group=seat.group), pieces


def recorded_training(world: World, request: Request) -> dict[str, Any]:
    """Train some steps with DDP; return the flight recorder's dump, and on rank 0 what NCCL's RAS answers."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(_TRAINED_STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 64, device=world.device)).square().mean().backward()
        optimizer.step()
    wait_for_device(world.device)
    dump = _finished_dump()
    found: dict[str, Any] = {"dump": dump, "backend": world.backend}
    if world.backend == "nccl":
        found["nccl"] = list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        if world.is_first:
            found["ras"] = _ras_answer(int(request["ras_port"]))
    dist.barrier()  # RAS counts the ranks that are still there
    return found


def _finished_dump() -> str:
    """Return a dump in which all collectives are finished; NCCL's watchdog notices that a little later."""
    until = time.monotonic() + _DONE_WITHIN_S
    while True:
        dump = dump_flight_record()
        groups = groups_of(read_flight_record(dump))
        if time.monotonic() > until or all(one.waits_in is None for one in groups.values()):
            return dump
        time.sleep(0.1)


def _ras_answer(port: int) -> str:
    """Return what NCCL's RAS service says about this job; empty if it does not answer."""
    parts = []
    address = ("localhost", port)
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address, timeout=_RAS_WITHIN_S) as connection,
    ):
        connection.sendall(b"verbose status\n")
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")


def main() -> None:
    """Answer a request."""
    answer_request({"exact-values": exact_collectives, "recorded-training": recorded_training})


if __name__ == "__main__":
    main()
