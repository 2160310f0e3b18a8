"""Device memory outside PyTorch's allocator: terms with their sources and a band.

These cannot be derived. Figures with a source were published for some GPUs and versions; the bands
are assumed.
"""

from dataclasses import dataclass

from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.units import MiB


@dataclass(frozen=True, kw_only=True)
class DeviceTerm:
    """One user of memory: its size, lower and upper limit, and source."""

    name: str
    size_bytes: int
    source: str
    low_bytes: int
    high_bytes: int


_CONTEXT = DeviceTerm(
    name="CUDA context",
    size_bytes=300 * MiB,
    low_bytes=250 * MiB,
    high_bytes=600 * MiB,
    source="about 300 MB with lazily loaded kernels, more if more are in use (pytorch#107667)",
)
_HIP_CONTEXT = DeviceTerm(
    name="HIP context",
    size_bytes=500 * MiB,
    low_bytes=300 * MiB,
    high_bytes=1024 * MiB,
    source="assumed: larger than CUDA's, since kernels are not loaded lazily",
)
_XPU_CONTEXT = DeviceTerm(
    name="driver context",
    size_bytes=400 * MiB,
    low_bytes=200 * MiB,
    high_bytes=1024 * MiB,
    source="assumed: no published figure",
)
# torch's workspace for cuBLAS: :4096:2:16:8, and 32 MiB on Hopper and newer (CUDABlas.cpp,
# CuBLASLt.cpp). torch allocates it on each stream that multiplies; a CPU trace does not see it.
_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_WORKSPACE_NEW_BYTES = 32 * MiB
_NEW_CARDS = ("H100", "H200", "H800", "GH200", "B200", "B100", "GB200", "B300", "RTX 50")


def outside_allocator(candidate: Candidate, hardware: Hardware) -> tuple[DeviceTerm, ...]:
    """Return the memory on a rank's device other than tensors and the allocator's cache."""
    kind = hardware.card.kind
    if kind == "cuda":
        return (_CONTEXT, _workspace(hardware), *_communicators(candidate, hardware))
    if kind == "rocm":
        return (_HIP_CONTEXT, *_rccl(candidate))
    if kind == "xpu":
        return (_XPU_CONTEXT,)
    if kind == "cpu":
        return (
            DeviceTerm(
                name="Python, torch and libraries",
                size_bytes=350 * MiB,
                low_bytes=250 * MiB,
                high_bytes=600 * MiB,
                source="assumed: memory of Python and torch after import",
            ),
        )
    return ()


def _workspace(hardware: Hardware) -> DeviceTerm:
    new = any(name in hardware.card.name for name in _NEW_CARDS)
    size = _WORKSPACE_NEW_BYTES if new else _WORKSPACE_BYTES
    return DeviceTerm(
        name="cuBLAS workspaces",
        size_bytes=2 * size,  # one for the forward thread and one for the backward thread
        low_bytes=size,
        high_bytes=4 * size,
        source="torch's default of CUBLAS_WORKSPACE_CONFIG, for each handle and stream",
    )


def process_groups(candidate: Candidate) -> tuple[int, ...]:
    """Return the sizes of the process groups that communicate through device memory."""
    layout = candidate.layout
    if layout.ranks == 1:
        return ()
    if candidate.strategy == "fsdp" and layout.copies > 1:
        # The group of all ranks is also used: for counts, and for finite checks.
        return tuple(size for size in (layout.ranks, layout.shards, layout.copies) if size > 1)
    return (layout.ranks,)


def _communicators(candidate: Candidate, hardware: Hardware) -> tuple[DeviceTerm, ...]:
    """Return NCCL's buffers for each group."""
    return tuple(
        DeviceTerm(
            name=f"NCCL, a group of {size}",
            size_bytes=(544 if size == 2 else 688) * MiB,
            low_bytes=200 * MiB,
            high_bytes=1100 * MiB,
            source="544 MB for 2 ranks, 688 MB for more on A100 with NVLink (nccl#964), the same "
            "beyond two machines (nccl#986)",
        )
        for size in process_groups(candidate)
    )


def _rccl(candidate: Candidate) -> tuple[DeviceTerm, ...]:
    return tuple(
        DeviceTerm(
            name=f"RCCL, a group of {size}",
            size_bytes=1024 * MiB if first else 666 * MiB,
            low_bytes=400 * MiB,
            high_bytes=1500 * MiB,
            source="1 GiB, and 0.65 GiB for each further group (LUMI guide)",
        )
        for first, size in (
            (number == 0, size) for number, size in enumerate(process_groups(candidate))
        )
    )
