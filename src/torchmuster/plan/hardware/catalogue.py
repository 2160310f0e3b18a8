"""Known accelerators: vendor figures, and how they are usually connected.

Rates are dense, without sparsity, with float32 accumulation; ``float32`` is without TF32, as torch
multiplies by default. Memory is what torch reports in its out-of-memory messages, the lowest value
seen over several drivers: less than the advertised size.

No data sheets were available: a GPU's ``source`` names the publication that quotes the vendor's
figures, and the figures that no publication confirms. The publications:

- torchtitan: ``torchtitan/tools/utils.py`` (0258167)
- Lightning: ``fabric/utilities/throughput.py`` (0810121)
- ml-engineering: stas00/ml-engineering, ``compute/accelerator/README.md`` (0074473)
- HGX table: NVIDIA's, copied to zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html
- hardware lists: feifeibear/LLMRoofline, lamonoai/gpumap, waredb.com, and for bandwidths
  datacrunch.io and baseten.co
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.errors import Impossible
from torchmuster.units import GiB


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator, or a rank's share of a machine's CPUs. Unknown values are missing."""

    name: str
    memory_bytes: int  # usable by a program, as the driver reports it
    flops: Mapping[str, float]  # peak rate by dtype: float32, bfloat16, float16
    bandwidth_bytes_s: float | None  # of its memory
    kind: str = "cuda"  # cuda, rocm, xpu, mps, cpu
    source: str = ""  # where these figures come from
    number_types: tuple[str, ...] | None = None  # dtypes it computes fast; None: unknown

    @property
    def noun(self) -> str:
        """The noun for one of them in messages: ``GPU``, or ``rank`` for a share of a CPU."""
        return "rank" if self.kind == "cpu" else "GPU"


@dataclass(frozen=True, kw_only=True)
class Link:
    """The cost of a message: a latency, and its bytes over a rate, in each direction."""

    latency_s: float
    bytes_s: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A number of identical machines."""

    card: Gpu
    machines: int
    cards_per_machine: int
    within: Link  # between two GPUs of a machine
    between: Link  # of one GPU, to another machine
    host_memory_bytes: int | None = None  # of one machine
    price_per_card_hour: float | None = None
    assumed: tuple[str, ...] = ()  # assumptions, as sentences for the user

    @property
    def cards(self) -> int:
        """The number of GPUs of all machines."""
        return self.machines * self.cards_per_machine


_TERA, _GIGA = 1e12, 1e9
# Latencies of a ring step, from NCCL's performance model (src/graph/tuning.cc, Ring LL128).
_NVLINK_S, _PCIE_S, _NETWORK_S = 1.9e-6, 2.5e-6, 4.0e-6
_LIGHTNING = "NVIDIA's figures as quoted by Lightning and hardware lists"
_TITAN = "NVIDIA's figures as quoted by torchtitan and ml-engineering"
_A100 = "NVIDIA's figures as quoted by torchtitan, Lightning and hardware lists"
_TITAN_AMD = "AMD's figures as quoted by torchtitan and ml-engineering"
_LISTS = "NVIDIA's figures as quoted by hardware lists"
_NOT_LOOKED_UP = "the vendor's figures, not verified"


@dataclass(frozen=True, kw_only=True)
class KnownGpu:
    """A GPU and its usual machine. Link rates are for one direction."""

    card: Gpu
    within: Link
    network_bytes_s: float
    network_is_shared: bool  # by the whole machine; otherwise every GPU has its own
    words: tuple[str, ...]  # all of them occur in the driver's name of the GPU
    cards_per_machine: int = 8


@dataclass(frozen=True, kw_only=True)
class _Join:
    """How GPUs are connected: within a machine, and to others (Gbit/s)."""

    within: str
    gbytes_s: float
    latency_s: float
    network_gbits: float
    shared: bool = False
    cards: int = 8


_PCIE3 = _Join(within="PCIe 3 x16", gbytes_s=16, latency_s=_PCIE_S, network_gbits=100, shared=True)
_PCIE4 = _Join(within="PCIe 4 x16", gbytes_s=32, latency_s=_PCIE_S, network_gbits=100, shared=True)
_PCIE5 = _Join(within="PCIe 5 x16", gbytes_s=64, latency_s=_PCIE_S, network_gbits=400, shared=True)
_DESK3 = _Join(
    within="PCIe 3 x16", gbytes_s=16, latency_s=_PCIE_S, network_gbits=10, shared=True, cards=4
)
_DESK4 = _Join(
    within="PCIe 4 x16", gbytes_s=32, latency_s=_PCIE_S, network_gbits=10, shared=True, cards=4
)
_DESK5 = _Join(
    within="PCIe 5 x16", gbytes_s=64, latency_s=_PCIE_S, network_gbits=10, shared=True, cards=4
)
_NVLINK2 = _Join(
    within="NVLink 2", gbytes_s=150, latency_s=_NVLINK_S, network_gbits=400, shared=True
)
_NVLINK3 = _Join(within="NVLink 3", gbytes_s=300, latency_s=_NVLINK_S, network_gbits=200)
_NVLINK4 = _Join(within="NVLink 4", gbytes_s=450, latency_s=_NVLINK_S, network_gbits=400)
_NVLINK5 = _Join(within="NVLink 5", gbytes_s=900, latency_s=_NVLINK_S, network_gbits=400)
_GRACE = _Join(
    within="NVLink 4", gbytes_s=450, latency_s=_NVLINK_S, network_gbits=400, shared=True, cards=1
)
_MI200 = _Join(
    within="Infinity Fabric", gbytes_s=50, latency_s=_NVLINK_S, network_gbits=800, shared=True
)
_MI300 = _Join(within="Infinity Fabric", gbytes_s=448, latency_s=_NVLINK_S, network_gbits=400)


def _catalogue_known(
    name: str,
    memory_gib: float,
    rates_tera: tuple[float, float | None, float | None],
    gbytes_s: float,
    join: _Join,
    words: str,
    *,
    source: str = _NOT_LOOKED_UP,
    kind: str = "cuda",
) -> KnownGpu:
    types = ("float32", "float16", "bfloat16")
    flops = {
        key: rate * _TERA for key, rate in zip(types, rates_tera, strict=True) if rate is not None
    }
    return KnownGpu(
        card=Gpu(
            name=name,
            memory_bytes=int(memory_gib * GiB),
            flops=flops,
            bandwidth_bytes_s=gbytes_s * _GIGA,
            kind=kind,
            source=source,
            number_types=tuple(sorted(flops)),
        ),
        within=Link(
            latency_s=join.latency_s,
            bytes_s=join.gbytes_s * _GIGA,
            source=f"{join.within}: peak rate in one direction, not verified",
        ),
        network_bytes_s=join.network_gbits / 8 * _GIGA,
        network_is_shared=join.shared,
        words=tuple(words.split()),
        cards_per_machine=join.cards,
    )


# name, memory, (float32, float16, bfloat16) in TFLOP/s, GB/s, connected by, words of the driver's
# name. If several match, the one with the most words in common is used; of those the first.
_ALL: tuple[KnownGpu, ...] = (
    _catalogue_known("T4", 14.56, (8.1, 65, None), 320, _PCIE3, "t4", source=_LIGHTNING),
    _catalogue_known(
        "V100-16GB", 15.77, (15.7, 125, None), 900, _NVLINK2, "v100 16gb", source=_LIGHTNING
    ),
    _catalogue_known(
        "V100-32GB", 31.73, (15.7, 125, None), 900, _NVLINK2, "v100 32gb", source=_LIGHTNING
    ),
    _catalogue_known(
        *("V100-PCIe-16GB", 15.77, (14, 112, None), 900, _PCIE3, "v100 pcie 16gb"),
        source=_LIGHTNING,
    ),
    _catalogue_known(
        *("V100-PCIe-32GB", 31.73, (14, 112, None), 900, _PCIE3, "v100 pcie 32gb"),
        source=_LIGHTNING,
    ),
    _catalogue_known("RTX-2080-Ti", 10.57, (13.4, 53.8, None), 616, _DESK3, "2080 ti"),
    _catalogue_known("RTX-3060", 11.6, (12.7, 25.5, 25.5), 360, _DESK4, "3060"),
    _catalogue_known("RTX-3090", 23.56, (35.6, 71, 71), 936, _DESK4, "3090", source=_LISTS),
    _catalogue_known("RTX-4090", 23.52, (82.6, 165.2, 165.2), 1008, _DESK4, "4090", source=_LISTS),
    _catalogue_known(
        *("RTX-5090", 31.36, (104.8, 209.5, 209.5), 1792, _DESK5, "5090"),
        source=f"{_LISTS}; float32 accumulation at half of their float16 rate",
    ),
    _catalogue_known(
        *("A10G", 22.05, (31.5, 70, 70), 600, _PCIE4, "a10g"),
        source=f"{_LISTS}; tensor core rates not verified",
    ),
    _catalogue_known("L4", 22.03, (30.3, 121, 121), 300, _PCIE4, "l4", source=_LISTS),
    _catalogue_known("L40S", 44.39, (91.6, 362, 362), 864, _PCIE4, "l40s", source=_TITAN),
    _catalogue_known(
        *("RTX-A6000", 47.4, (38.7, 154.8, 154.8), 768, _PCIE4, "a6000"),
        source=f"{_LISTS}; tensor core rates not verified",
    ),
    _catalogue_known(
        "A100-80GB", 79.15, (19.5, 312, 312), 2039, _NVLINK3, "a100 80gb", source=_A100
    ),
    _catalogue_known(
        "A100-40GB", 39.38, (19.5, 312, 312), 1555, _NVLINK3, "a100 40gb", source=_A100
    ),
    _catalogue_known(
        *("A100-PCIe-80GB", 79.15, (19.5, 312, 312), 1935, _PCIE4, "a100 pcie 80gb"),
        source=f"{_A100}; memory bandwidth not verified",
    ),
    _catalogue_known(
        *("A100-PCIe-40GB", 39.38, (19.5, 312, 312), 1555, _PCIE4, "a100 pcie 40gb"), source=_A100
    ),
    _catalogue_known(
        "H100", 79.18, (67, 989.4, 989.4), 3350, _NVLINK4, "h100 80gb hbm3", source=_TITAN
    ),
    _catalogue_known(
        "H100-PCIe", 79.18, (51, 756, 756), 2000, _PCIE5, "h100 pcie 80gb", source=_TITAN
    ),
    _catalogue_known(
        *("H100-NVL", 93.02, (60, 835.5, 835.5), 3900, _PCIE5, "h100 nvl 94gb"),
        source=f"{_TITAN}; float32 rate not verified",
    ),
    _catalogue_known(
        "H200", 139.8, (67, 989.4, 989.4), 4800, _NVLINK4, "h200 141gb", source=_TITAN
    ),
    _catalogue_known(
        *("B200", 178.35, (75, 2250, 2250), 7700, _NVLINK5, "b200 180gb 192gb"),
        source="NVIDIA's HGX table, as quoted by others",
    ),
    _catalogue_known(
        *("GH200", 94.5, (67, 989.4, 989.4), 4000, _GRACE, "gh200 96gb 480gb"),
        source=f"{_TITAN}, with the rates of H100",
    ),
    _catalogue_known("MI210", 63.98, (22.6, 181, 181), 1638, _MI200, "mi210 64gb", kind="rocm"),
    # Torch sees each half of the GPU as a separate device: these are the figures of one half.
    _catalogue_known(
        *("MI250X", 63.98, (23.9, 191.5, 191.5), 1638, _MI200, "mi250x 64gb 128gb"),
        source=f"{_TITAN_AMD}, one of its two dies",
        kind="rocm",
    ),
    _catalogue_known(
        *("MI300X", 191.69, (163.4, 1307.4, 1307.4), 5300, _MI300, "mi300x 192gb"),
        source=f"{_TITAN_AMD}, with a rounded matrix rate",
        kind="rocm",
    ),
)
_MAKERS = frozenset({"nvidia", "amd", "tesla", "geforce", "rtx", "instinct", "graphics", "gpu"})
_FORMS = frozenset({"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam", "hbm3", "hbm3e", "hbm2e"})


def known_gpus() -> list[str]:
    """Return all GPUs by the names used in messages."""
    return [one.card.name for one in _ALL]


def gpu_named(name: str) -> Gpu:
    """Return a GPU by name: ``H100``, ``a100-80gb``, or a driver's ``NVIDIA H100 80GB HBM3``."""
    return known_gpu(name).card


def known_gpu(name: str) -> KnownGpu:
    """Return a GPU with its usual machine; raise if the name is unknown or ambiguous."""
    asked = _catalogue_text(name)
    models = [one for one in _ALL if asked and _catalogue_text(one.words[0]) <= asked]
    fitting = [one for one in models if asked <= _catalogue_text(*one.words, one.card.name)]
    if not fitting:
        raise _catalogue_unknown(name)
    return max(
        fitting, key=lambda one: (_catalogue_message(one, asked), -len(_catalogue_text(*one.words)))
    )


def find_gpu(name: str) -> KnownGpu | None:
    """Return a GPU by a driver's name, or None if it is not in the catalogue."""
    try:
        return known_gpu(name)
    except Impossible:
        return None


def _catalogue_message(one: KnownGpu, asked: frozenset[str]) -> int:
    return len(asked & _catalogue_text(*one.words))


def _catalogue_text(*texts: str) -> frozenset[str]:
    """Return the identifying words of a name: ``NVIDIA A100-SXM4-80GB`` is a100 and 80gb."""
    words = re.findall(r"[a-z0-9]+", " ".join(texts).lower())
    joined = re.sub(r"(\d+) gb\b", r"\1gb", " ".join(words))
    joined = re.sub(r"\b(rtx|gtx)?(\d{4})ti\b", r"\2 ti", joined)
    joined = re.sub(r"\brtx(\d{4})\b", r"\1", joined)
    return frozenset(joined.split()) - _MAKERS - _FORMS


def _catalogue_unknown(name: str) -> Impossible:
    if re.search(r"\b(apple|m[1-9])\b", name.lower()):
        return Impossible(
            f"{name} is not in the GPU catalogue",
            why="Apple does not publish the rates of its GPUs, and they share the system memory",
            fix="run muster plan on that machine, with --hardware here",
        )
    nearest = difflib.get_close_matches(name.upper(), known_gpus(), n=3, cutoff=0.4)
    near = f"closest: {', '.join(nearest)}; " if nearest else ""
    return Impossible(
        f"{name} is not in the GPU catalogue",
        why=f"{near}the catalogue has: {', '.join(known_gpus())}",
        fix="use one of these, or run muster plan on a machine that has it",
    )
