"""The tests of the lab communication: pytest tests/, or muster lab check."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.labs.testing import (
    Submission,
    compare,
    exercise,
    replaced,
    require,
    watched,
    without,
)


@contextmanager
def _imagined_gpus(count: int, calls_made: list[str]) -> Iterator[None]:
    """Make torch report GPUs, and record the calls that use them."""

    def properties(place: int) -> dict[str, Any]:
        return {"name": f"GPU {place}"}

    with ExitStack() as stack:
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "get_device_properties": properties,
            "set_device": lambda place: calls_made.append(f"set_device({place})"),
        }.items():
            stack.enter_context(replaced(torch.cuda, name, value))
        yield


@exercise
def test_get_device_info(submission: Submission) -> None:
    """A machine with GPUs, and one without."""
    with _imagined_gpus(3, []):
        info = submission.code.get_device_info()
    compare(info["num_gpus"], 3, 'with 3 GPUs, "num_gpus"')
    seen = f"with 3 GPUs there are {len(info['devices'])} devices"
    require(len(info["devices"]) == 3, "first-device-only", seen)
    require(info["cuda_available"] is True, "wrong-value", '"cuda_available" is not True')
    with without("no-gpu-crashes", Exception):
        info = submission.code.get_device_info()
    none = info["num_gpus"] == 0 and list(info["devices"]) == [] and not info["cuda_available"]
    require(none, "wrong-value", f"without a GPU it returned {info}")


@exercise
def test_get_local_rank(submission: Submission) -> None:
    """LOCAL_RANK as a number, 0 without a launcher."""
    os.environ.update(LOCAL_RANK="3", RANK="11")
    given = submission.code.get_local_rank()
    require(str(given) != "11", "rank-for-local-rank", "with RANK=11 LOCAL_RANK=3 it returned 11")
    require(not isinstance(given, str), "local-rank-is-text", f"it returned {given!r}")
    compare(given, 3, "with LOCAL_RANK=3, get_local_rank")
    del os.environ["LOCAL_RANK"]
    with without("local-rank-without-launcher", KeyError, TypeError, ValueError):
        given = submission.code.get_local_rank()
    compare(given, 0, "without LOCAL_RANK, get_local_rank")


@exercise
def test_setup_distributed(submission: Submission) -> None:
    """Device before group, the right rank, and the given rendezvous address."""
    order: list[str] = []
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def imagined(backend: str | None = None, **named: Any) -> None:
        order.append("init_process_group")

    os.environ["LOCAL_RANK"] = "1"  # as on a second machine
    with _imagined_gpus(2, order), replaced(dist, "init_process_group", imagined):
        submission.code.setup_distributed(submission.rank + 2, 4)
    late = order[:1] != ["set_device(1)"] and "set_device(1)" in order
    require(not late, "device-after-group", f"with GPUs: {', then '.join(order)}")
    require("set_device(1)" in order, "no-set-device", f"with GPUs: {', then '.join(order)}")

    def check_arguments(backend: str | None = None, **named: Any) -> None:
        current = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        require(
            current == address,
            "address-overwritten",
            f"{':'.join(address)} became {':'.join(current)}",
        )
        require(backend != "nccl", "nccl-on-cpu", "init_process_group was given nccl")
        rank = named.get("rank", submission.rank)
        require(
            rank == submission.rank,
            "everyone-is-rank-0",
            f"rank {submission.rank} joined as {rank}",
        )

    for name in ("RANK", "WORLD_SIZE"):  # given as arguments, as torch.multiprocessing does
        del os.environ[name]
    with watched(dist, "init_process_group", before=check_arguments):
        submission.code.setup_distributed(submission.rank, submission.world_size)
    require(dist.is_initialized(), "wrong-value", "there is no group afterwards")
    compare(dist.get_rank(), submission.rank, "dist.get_rank()")
    compare(dist.get_world_size(), submission.world_size, "dist.get_world_size()")
    dist.barrier()


@exercise
def test_verify_gpu_communication(submission: Submission) -> None:
    """True if the sum is correct, False otherwise."""
    with watched(dist, "all_reduce") as calls:
        works = submission.code.verify_gpu_communication(submission.rank, submission.world_size)
    require(bool(calls), "collective-on-one-rank", f"rank {submission.rank} called no all_reduce")
    dist.barrier()
    require(isinstance(works, bool), "wrong-value", f"it returned {works!r}, not True or False")
    require(works, "wrong-value", "it returned False, but the ranks do communicate")
    with replaced(dist, "all_reduce", lambda *_, **__: None):  # nothing arrives
        broken = submission.code.verify_gpu_communication(submission.rank, submission.world_size)
    require(not broken, "value-not-checked", "nothing was sent, but it returned True")


@exercise
def test_cleanup_distributed(submission: Submission) -> None:
    """The group is destroyed, and a second call does nothing."""
    submission.code.cleanup_distributed()
    require(not dist.is_initialized(), "still-in-the-group", "dist.is_initialized() is True")
    with without("cleanup-twice", AssertionError, RuntimeError, ValueError):
        submission.code.cleanup_distributed()
