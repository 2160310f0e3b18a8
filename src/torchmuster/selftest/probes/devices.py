"""What one process sees of the GPUs: prints one line of JSON, or keeps a GPU until its stdin is closed.

python -m torchmuster.selftest.probes.devices seen | started | started-late | busy | quiet

Torch is imported only in functions: some of this is about the time before.
"""

import json
import sys

from torchmuster.devices.cuda_driver import cuda_has_started

# About 30 s, in kernels of 50 ms: a GPU with a display ends longer ones. The process is killed long before.
_KERNELS, _CYCLES = 600, 100_000_000
_HELD_BYTES = 1 << 24


def main() -> None:
    """Do what the command line names."""
    match sys.argv[1]:
        case "seen":
            _print_answer(_seen())
        case "started":
            _print_answer(_driver_states(late=False))
        case "started-late":
            _print_answer(_driver_states(late=True))
        case "busy":
            _hold(busy=True)
        case "quiet":
            _hold(busy=False)


def _print_answer(found: object) -> None:
    print(json.dumps(found), flush=True)


def _seen() -> list[dict[str, str]]:
    """Return UUID and PCI address of each GPU that torch sees."""
    import torch

    found = []
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        parts = [getattr(gpu, f"pci_{name}_id", -1) for name in ("domain", "bus", "device")]
        pci = "" if -1 in parts else "{:08x}:{:02x}:{:02x}.0".format(*parts)
        found.append({"uuid": str(getattr(gpu, "uuid", "")), "pci": pci})
    return found


def _driver_states(*, late: bool) -> dict[str, bool]:
    """Return whether the CUDA driver has started: at first, after the import of torch, after CUDA's start."""
    found = {} if late else {"before": cuda_has_started()}
    import torch

    found["imported"] = cuda_has_started()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if late:
        found["before"] = cuda_has_started()
    return {**found, "after": cuda_has_started()}


def _hold(*, busy: bool) -> None:
    """Hold memory on a GPU, if busy with kernels for long, and sleep on the host."""
    import torch

    from torchmuster.selftest.torch_private import occupy_gpu

    held = torch.empty(_HELD_BYTES, dtype=torch.uint8, device="cuda")  # without a kernel
    if busy:
        for _ in range(_KERNELS):  # queued at once; the host then sleeps
            occupy_gpu(_CYCLES)
    _print_answer({"held_bytes": held.nbytes})
    sys.stdin.read()


if __name__ == "__main__":
    main()
