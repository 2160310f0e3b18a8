"""Device memory outside PyTorch's allocator: terms with their sources and a band.

These cannot be derived. Figures with a source were published for some GPUs and versions; the bands
are assumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.units import MiB

_NEW_CARDS = ("H100", "H200", "H800", "GH200", "B200", "B100", "GB200", "B300", "RTX 50")
_NCCL = (
    "544 MB for 2 ranks, 688 MB for more on A100 with NVLink (nccl#964), the same beyond two "
    "machines (nccl#986)"
)


@dataclass(frozen=True)
class DeviceTerm:
    """One user of memory: its size, lower and upper limit, and source."""

    name: str
    size_bytes: int
    low_bytes: int
    high_bytes: int
    source: str


_CONTEXTS = {
    "cuda": DeviceTerm(
        "CUDA context",
        300 * MiB,
        250 * MiB,
        600 * MiB,
        "about 300 MB with lazily loaded kernels, more if more are in use (pytorch#107667)",
    ),
    "rocm": DeviceTerm(
        "HIP context",
        500 * MiB,
        300 * MiB,
        1024 * MiB,
        "assumed: larger than CUDA's, since kernels are not loaded lazily",
    ),
    "xpu": DeviceTerm(
        "driver context", 400 * MiB, 200 * MiB, 1024 * MiB, "assumed: no published figure"
    ),
    "cpu": DeviceTerm(
        "Python, torch and libraries",
        350 * MiB,
        250 * MiB,
        600 * MiB,
        "assumed: memory of Python and torch after import",
    ),
}
# torch's workspace for cuBLAS: :4096:2:16:8, and 32 MiB on Hopper and newer (CUDABlas.cpp,
# CuBLASLt.cpp). torch allocates it on each stream that multiplies; a CPU trace does not see it.
_WORKSPACE_BYTES, _WORKSPACE_NEW_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8, 32 * MiB


def outside_allocator(candidate: Candidate, hardware: Hardware) -> tuple[DeviceTerm, ...]:
    """Return the memory on a rank's device other than tensors and the allocator's cache."""
    kind = hardware.card.kind
    if kind not in _CONTEXTS:
        return ()
    return (_CONTEXTS[kind], *_workspaces(hardware), *_communicators(candidate, kind))


def _workspaces(hardware: Hardware) -> Iterator[DeviceTerm]:
    if hardware.card.kind != "cuda":
        return
    new = any(name in hardware.card.name for name in _NEW_CARDS)
    size = _WORKSPACE_NEW_BYTES if new else _WORKSPACE_BYTES
    source = "torch's default of CUBLAS_WORKSPACE_CONFIG, for each handle and stream"
    # One for the forward thread and one for the backward thread.
    yield DeviceTerm("cuBLAS workspaces", 2 * size, size, 4 * size, source)


def _communicators(candidate: Candidate, kind: str) -> Iterator[DeviceTerm]:
    """Yield the buffers of each process group that communicates through device memory."""
    layout = candidate.layout
    groups = [layout.ranks]
    if candidate.strategy == "fsdp" and layout.copies > 1:
        # The group of all ranks is also used: for counts, and for finite checks.
        groups += [layout.shards, layout.copies]
    for number, size in enumerate(groups):
        if size == 1:
            continue
        if kind == "cuda":
            own = 544 if size == 2 else 688
            yield DeviceTerm(f"NCCL, a group of {size}", own * MiB, 200 * MiB, 1100 * MiB, _NCCL)
        elif kind == "rocm":
            own = 666 if number else 1024
            source = "1 GiB, and 0.65 GiB for each further group (LUMI guide)"
            yield DeviceTerm(f"RCCL, a group of {size}", own * MiB, 400 * MiB, 1500 * MiB, source)
