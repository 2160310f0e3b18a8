"""Accelerators by name, such as ``2x8xH100``; the figures and their sources are in ``gpus.toml``."""

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
PCIE_BYTES_S = 16e9  # PCIe 3 x16, where no link is known
ETHERNET_BYTES_S = 1.25e9  # 10 Gbit/s, where no network is known
_COUNTED = re.compile(r"(?:(\d{1,7})\s*[x×*]\s*)?(?:(\d{1,7})\s*[x×*]\s*)?(\S.*)", re.IGNORECASE)
_MAKERS = frozenset({"nvidia", "amd", "tesla", "geforce", "rtx", "instinct", "graphics", "gpu"})
_FORMS = frozenset({"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam", "hbm3", "hbm3e", "hbm2e"})


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator and its usual links, or a rank's share of a machine's CPUs.

    Rates are for one direction. What is unknown is missing.
    """

    name: str
    name_parts: tuple[str, ...] = ()  # of the driver's name; the first one is the model
    memory_bytes: int  # usable by a program, as the driver reports it
    flops: Mapping[str, float]  # peak rate by dtype: float32, bfloat16, float16
    bandwidth_bytes_s: float | None  # of its memory
    kind: str = "cuda"  # cuda, rocm, xpu, mps, cpu
    source: str = ""  # where these figures come from
    within_bytes_s: float = PCIE_BYTES_S  # to another one of its machine
    network_bytes_s: float = ETHERNET_BYTES_S  # to another machine
    network_is_shared: bool = True  # by the whole machine; otherwise every GPU has its own

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
    host_memory_bytes: int | None = None  # of one machine
    assumed: tuple[str, ...] = ()  # assumptions, as sentences for the user

    @property
    def cards(self) -> int:
        """The number of GPUs of all machines."""
        return self.machines * self.cards_per_machine

    @property
    def between_bytes_s(self) -> float:
        """The rate of one GPU to another machine, if all use the network at once."""
        sharing = self.cards_per_machine if self.card.network_is_shared else 1
        return self.card.network_bytes_s / sharing

    def describe(self) -> str:
        """Describe it in one line: ``2 machines with 8 x H100 each``."""
        cards = f"{self.cards_per_machine} x {self.card.name}"
        return cards if self.machines == 1 else f"{self.machines} machines with {cards} each"


def parse_hardware(text: str) -> Hardware:
    """Parse ``H100``, ``8xH100`` or ``2x8xH100``, connected as such GPUs usually are."""
    counted = _COUNTED.fullmatch(text.strip())
    assert counted is not None, "the command line gives no empty text"
    first, second, name = counted.groups()
    machines, cards = (first, second) if second else ("1", first or "1")
    if not int(machines) or not int(cards):
        raise Impossible(
            f"{text} is not valid hardware",
            why="it needs at least one GPU",
            fix="write for example 8xH100, or 2x8xH100 for two machines",
        )
    card = known_gpu(name)
    return Hardware(card=card, machines=int(machines), cards_per_machine=int(cards))


@cache
def all_known() -> list[Gpu]:
    """Return the GPUs of ``gpus.toml``."""
    text = files("torchmuster.plan.hardware").joinpath("gpus.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    return [_gpu(entry, document["links"][entry["link"]]) for entry in document["gpu"]]


def _gpu(entry: Mapping[str, Any], link: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=entry["name"],
        name_parts=tuple(entry["name_parts"].split()),
        memory_bytes=int(entry["memory_gib"] * GiB),
        flops={dtype: rate * _TERA for dtype, rate in entry["rates"].items()},
        bandwidth_bytes_s=entry["bandwidth"] * _GIGA,
        kind=entry.get("kind", "cuda"),
        source=entry["source"],
        within_bytes_s=link["bandwidth"] * _GIGA,
        network_bytes_s=link["network_gbits"] * _GBIT,
        network_is_shared=link.get("network_is_shared", False),
    )


def known_gpu(name: str) -> Gpu:
    """Return a GPU by its name; raise if it is unknown."""
    known = find_gpu(name)
    if known is None:
        names = ", ".join(gpu.name for gpu in all_known())
        raise Impossible(
            f"{name} is not in the GPU catalogue",
            why=f"the catalogue has: {names}",
            fix="use one of these, or run muster plan on a machine that has it: --hardware here",
        )
    return known


def find_gpu(name: str) -> Gpu | None:
    """Return a GPU by a driver's name, or None if it is not in the catalogue.

    A name with any other word, such as another size of memory, is not taken for a known GPU.
    """
    wanted = _parts_of(name)
    fitting = []
    for gpu in all_known():
        if gpu.name_parts[0] in wanted and wanted <= {*gpu.name_parts, *_parts_of(gpu.name)}:
            fitting.append(gpu)
    return max(
        fitting,
        key=lambda gpu: (len(wanted.intersection(gpu.name_parts)), -len(gpu.name_parts)),
        default=None,
    )


def _parts_of(name: str) -> frozenset[str]:
    """Return the identifying words of a name: ``NVIDIA A100-SXM4-80GB`` is a100 and 80gb."""
    text = re.sub(r"\b(?:rtx|gtx)?(\d{4})(ti)?\b", r"\1 \2", name.lower())  # rtx4090, 2080ti
    return frozenset(re.findall(r"[a-z0-9]+", text)) - _MAKERS - _FORMS
