"""Known accelerators: the figures and their sources are in ``gpus.toml``."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from torchmuster.errors import Impossible
from torchmuster.units import GiB

_TERA, _GIGA, _GBIT = 1e12, 1e9, 1e9 / 8
_USUAL_GPUS_PER_MACHINE = 8
_MAKERS = frozenset({"nvidia", "amd", "tesla", "geforce", "rtx", "instinct", "graphics", "gpu"})
_FORMS = frozenset({"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam", "hbm3", "hbm3e", "hbm2e"})


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
class Hardware:
    """A number of identical machines."""

    card: Gpu
    machines: int
    cards_per_machine: int
    within_bytes_s: float  # between two GPUs of a machine, in each direction
    between_bytes_s: float  # of one GPU, to another machine
    host_memory_bytes: int | None = None  # of one machine
    assumed: tuple[str, ...] = ()  # assumptions, as sentences for the user

    @property
    def cards(self) -> int:
        """The number of GPUs of all machines."""
        return self.machines * self.cards_per_machine


@dataclass(frozen=True, kw_only=True)
class KnownGpu:
    """A GPU and its usual machine. Link rates are for one direction."""

    card: Gpu
    within_bytes_s: float
    has_nvlink: bool  # usually
    network_bytes_s: float
    network_is_shared: bool  # by the whole machine; otherwise every GPU has its own
    name_parts: frozenset[str]  # all of them occur in the driver's name of the GPU
    model: frozenset[str]  # those that name the model; the rest are its forms
    cards_per_machine: int = _USUAL_GPUS_PER_MACHINE


@cache
def all_known() -> list[KnownGpu]:
    """Return the GPUs of ``gpus.toml``."""
    text = files("torchmuster.plan.hardware").joinpath("gpus.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    return [_known(entry, document["links"][entry["link"]]) for entry in document["gpu"]]


def _known(entry: Mapping[str, Any], link: Mapping[str, Any]) -> KnownGpu:
    rates = {dtype: rate * _TERA for dtype, rate in entry["rates"].items()}
    return KnownGpu(
        card=Gpu(
            name=entry["name"],
            memory_bytes=int(entry["memory_gib"] * GiB),
            flops=rates,
            bandwidth_bytes_s=entry["bandwidth"] * _GIGA,
            kind=entry.get("kind", "cuda"),
            source=entry["source"],
            number_types=tuple(sorted(rates)),
        ),
        within_bytes_s=link["bandwidth"] * _GIGA,
        has_nvlink=link.get("nvlink", False),
        network_bytes_s=link["network_gbits"] * _GBIT,
        network_is_shared=link.get("network_is_shared", False),
        name_parts=_parts_of(entry["words"]),
        model=_parts_of(entry["words"].split()[0]),
        cards_per_machine=link.get("gpus_per_machine", _USUAL_GPUS_PER_MACHINE),
    )


def known_gpu(name: str) -> KnownGpu:
    """Return a GPU with its usual machine; raise if the name is unknown."""
    known = find_gpu(name)
    if known is None:
        names = ", ".join(known.card.name for known in all_known())
        raise Impossible(
            f"{name} is not in the GPU catalogue",
            why=f"the catalogue has: {names}",
            fix="use one of these, or run muster plan on a machine that has it: --hardware here",
        )
    return known


def find_gpu(name: str) -> KnownGpu | None:
    """Return a GPU by a driver's name, or None if it is not in the catalogue."""
    wanted = _parts_of(name)
    fitting = []
    for known in all_known():
        is_model = bool(wanted) and known.model <= wanted
        if is_model and wanted <= known.name_parts | _parts_of(known.card.name):
            fitting.append(known)
    if not fitting:
        return None
    return max(fitting, key=lambda known: (len(wanted & known.name_parts), -len(known.name_parts)))


def _parts_of(name: str) -> frozenset[str]:
    """Return the identifying words of a name: ``NVIDIA A100-SXM4-80GB`` is a100 and 80gb."""
    text = " ".join(re.findall(r"[a-z0-9]+", name.lower()))
    text = re.sub(r"(\d+) gb\b", r"\1gb", text)
    text = re.sub(r"\b(rtx|gtx)?(\d{4})ti\b", r"\2 ti", text)
    text = re.sub(r"\brtx(\d{4})\b", r"\1", text)
    return frozenset(text.split()) - _MAKERS - _FORMS
