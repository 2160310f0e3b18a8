"""Ranks that fail in the way that the command line names, so that the error of a real run can be explained.

muster run -m torchmuster.selftest.probes.mistakes MISTAKE
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

_ALLOWED_BYTES = 1 << 28
_CLASSES = 10


def main() -> None:
    """Make one mistake."""
    match sys.argv[1]:
        case "no-interface":
            # Set here, after the checks of `muster run`.
            os.environ["GLOO_SOCKET_IFNAME"] = "muster-none0"
            dist.init_process_group("gloo")
        case "killed":
            _be_killed()
        case "label-out-of-range":
            _mislabel()
        case "out-of-memory":
            _fill_memory()
        case "same-gpu":
            _share_gpu()


def _be_killed() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _mislabel() -> None:
    scores = torch.zeros(4, _CLASSES, device="cuda")
    labels = torch.full((4,), _CLASSES, device="cuda")
    torch.nn.functional.cross_entropy(scores, labels)
    torch.cuda.synchronize()


def _fill_memory() -> None:
    """Exceed a limit of this process; the rest of the GPU stays as it is."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(_ALLOWED_BYTES / total, 0)
    torch.empty(2 * _ALLOWED_BYTES, dtype=torch.uint8, device="cuda")


def _share_gpu() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
