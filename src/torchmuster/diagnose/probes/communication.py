"""One all-reduce over an existing process group, with every value verified."""

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

from torchmuster.diagnose.probes.exact_values import (
    compare_values,
    exact_numbers,
    exact_sums,
    forget_groups,
    wait_for_device,
)
from torchmuster.diagnose.probes.in_time import in_time
from torchmuster.launch.probes.process_group import current_device

_log = logging.getLogger("torchmuster.distributed")

_COUNT = 2**18  # 1 MiB: large enough to leave NCCL's small-message path


def verify_communication(rank: int, world_size: int, timeout_s: float) -> bool:
    """Run an all-reduce over all ranks and return whether every value is correct."""
    if not dist.is_initialized():
        _log.error("communication not verified: there is no process group; call setup_distributed")
        return False
    device = current_device()
    try:
        got = _sum_over_ranks(rank, device, timeout_s)
        values = compare_values(got, exact_sums(world_size, _COUNT, 0, device))
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0] if text else ''}"
        _log.error("communication failed on rank %d (%s): %s", rank, device, reason)
        return False
    finally:
        forget_groups()
    if values.wrong:
        _log.error(
            "communication is wrong on rank %d (%s): the sum over %d ranks is %s, expected %g "
            "(%d of %d values)",
            *(
                rank,
                device,
                world_size,
                "not a number" if values.got is None else f"{values.got:g}",
            ),
            *(values.expected, values.wrong, values.compared),
        )
    return not values.wrong


def _sum_over_ranks(rank: int, device: torch.device, timeout_s: float) -> torch.Tensor:
    """Return the sums; raise on an error or after the timeout."""
    limit = timedelta(seconds=timeout_s)

    def reduce() -> torch.Tensor:
        values = exact_numbers(rank, _COUNT, 0, device)
        if device.type != "cpu":
            # A timeout of the operation is also the watchdog's, which kills the process.
            dist.all_reduce(values)
            wait_for_device(device)
            return values
        options = dist.AllreduceOptions()
        options.timeout = limit
        world = dist.group.WORLD
        assert world is not None
        world.allreduce([values], options).wait(limit)
        return values

    # On the CPU the backend usually enforces the timeout itself; it gets 1 s more to report its error.
    return in_time(reduce, timeout_s + 1)
