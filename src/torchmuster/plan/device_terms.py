"""Device memory outside PyTorch's allocator: terms with their sources and a band.

These cannot be derived. Figures with a source were published for some GPUs and versions; the bands
are assumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Candidate
from torchmuster.units import MiB

BAND = 2.0  # terms are between a half and twice their size
# torch's workspace for cuBLAS: :4096:2:16:8, and 32 MiB on Hopper and newer (CUDABlas.cpp,
# CuBLASLt.cpp). torch allocates it on each stream that multiplies; a CPU trace does not see it.
_WORKSPACE_BYTES, _WORKSPACE_NEW_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8, 32 * MiB
_NEW_FLOPS = 700e12  # in 16 bits: cards from Hopper on reach more


@dataclass(frozen=True)
class DeviceTerm:
    """One user of memory."""

    name: str
    size_bytes: int
    source: str


_CONTEXT = DeviceTerm(
    "CUDA context",
    300 * MiB,
    "about 300 MB with lazily loaded kernels, more if more are in use (pytorch#107667)",
)
_OTHER_CONTEXT = DeviceTerm("driver and libraries", 400 * MiB, "assumed: no published figure")


def outside_allocator(candidate: Candidate, hardware: Hardware) -> tuple[DeviceTerm, ...]:
    """Return the memory on a rank's device other than tensors and the allocator's cache."""
    kind = hardware.card.kind
    if kind != "cuda":
        return (_OTHER_CONTEXT, *_communicators(candidate, kind))
    return (_CONTEXT, _workspaces(hardware.card), *_communicators(candidate, kind))


def _workspaces(card: Gpu) -> DeviceTerm:
    is_new = max(card.flops.values(), default=0.0) > _NEW_FLOPS
    size = _WORKSPACE_NEW_BYTES if is_new else _WORKSPACE_BYTES
    # One for the forward thread and one for the backward thread.
    source = "torch's default of CUBLAS_WORKSPACE_CONFIG, for each handle and stream"
    return DeviceTerm("cuBLAS workspaces", 2 * size, source)


def _communicators(candidate: Candidate, kind: str) -> Iterator[DeviceTerm]:
    """Yield the buffers of each process group that communicates through device memory."""
    layout = candidate.layout
    groups = [layout.ranks]
    if candidate.strategy == "fsdp" and layout.copies > 1:
        # The group of all ranks is also used: for counts, and for finite checks.
        groups += [layout.shards, layout.copies]
    for size in groups:
        if size > 1 and kind == "cuda":
            own = 544 if size == 2 else 688
            source = "544 MB for 2 ranks, 688 MB for more, on A100 with NVLink (nccl#964, #986)"
            yield DeviceTerm(f"NCCL, a group of {size}", own * MiB, source)
        elif size > 1 and kind == "rocm":
            source = "1 GiB, and 0.65 GiB for each further group (LUMI guide)"
            yield DeviceTerm(f"RCCL, a group of {size}", 1024 * MiB, source)
