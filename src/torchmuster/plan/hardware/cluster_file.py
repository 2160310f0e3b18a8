"""A cluster described in a YAML file.

::

    machines: 4
    cards_per_machine: 8
    card: H100              # a catalogue name; or any name, with memory, bandwidth and tflops
    memory: 79GiB           # of a GPU, if different from the catalogue
    bandwidth: 3350GB/s     # of a GPU's memory
    tflops: {bfloat16: 989, float32: 67}
    host_memory: 2TiB       # of a machine
    links:
      within: {bandwidth: 450GB/s, latency_s: 2e-6}    # between two GPUs of a machine
      between: {bandwidth: 400Gbit/s, latency_s: 4e-6} # of one GPU, to other machines
    check: runs/20260102-check/check.json  # links that muster check measured
    price: 2.50             # per GPU and hour

Everything except ``card`` is optional; the catalogue has the defaults. ``check`` is a check.json of
``muster check``.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmuster import untrusted
from torchmuster.config import fields, yaml12
from torchmuster.errors import ConfigError, Impossible, Mistake
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.units import KiB, parse_bytes

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """Measured links; None for a kind that was not measured."""

    within: Link | None
    between: Link | None


def read_measured_links(
    path: Path, *, cards_per_machine: int, network_is_shared: bool
) -> MeasuredLinks:
    """Return the slowest links, which limit a ring; raise ``ValueError`` with a message."""
    try:
        document = untrusted.read_json(path)
        # Two ranks measure with the whole network; in training the GPUs of a machine share it,
        # unless each has its own.
        share = cards_per_machine if network_is_shared else 1
        ranks = {one["rank"]: one for one in document["ranks"]}
        pairs = [
            (one["host"] == ranks[pair["peer"]]["host"], pair)
            for one in ranks.values()
            for pair in one.get("pairs", ())
            if pair["peer"] in ranks
        ]
        machines = [
            {"bytes_per_s": one["bytes_per_s"], "latency_s": (one["round_trip_s"] or 0.0) / 2}
            for one in document["links"]
        ]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a check.json of muster check") from error
    source = f"measured by muster check ({path})"
    within = _slowest((pair for near, pair in pairs if near), 1, source)
    between = _slowest((pair for near, pair in pairs if not near), share, source)
    # Between machines without their GPUs, one network was measured, whatever others there are.
    return MeasuredLinks(
        within=within, between=between or _slowest(machines, cards_per_machine, source)
    )


def _slowest(pairs: Iterable[Mapping[str, Any]], share: int, source: str) -> Link | None:
    measured = [one for one in pairs if one.get("bytes_per_s")]
    if not measured:
        return None
    return Link(
        latency_s=max(one.get("latency_s") or 0.0 for one in measured),
        bytes_s=min(one["bytes_per_s"] for one in measured) / share,
        source=source,
    )


# A lower-case b means bits, an upper-case B bytes.
_MOST_BYTES = 256 * KiB
_NOT_A_CLUSTER_FILE = (
    f"is not a cluster file: no regular file, or larger than {_MOST_BYTES // KiB} KiB"
)
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgtKMGT]?)([Bb]its?|b|i?B)\s*/\s*s\s*")
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TYPES = ("float32", "bfloat16", "float16")


def _cluster_file_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("takes a whole number of at least 1")
    return value


def _cluster_file_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise ValueError("takes a number of at least 0")
    return float(value)


def _positive(value: object) -> float:
    number = _cluster_file_number(value)
    if not number:
        raise ValueError("takes a number above 0")
    return number


def _cluster_file_text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("takes text")
    return str(value)


def _cluster_file_size(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError("takes a size with its unit, such as 79GiB")
    size = parse_bytes(value)
    if not size:
        raise ValueError("takes a size above 0, such as 79GiB")
    return size


def _cluster_file_rate(value: object) -> float:
    """Parse ``450GB/s`` or ``400Gbit/s`` into bytes per second."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("takes bytes or bits per second, such as 450GB/s or 400Gbit/s")
    number, scale, unit = match.groups()
    rate = (
        float(parse_bytes(number + scale + unit))
        if unit.endswith("B")
        else float(number) * _BITS[scale.lower()] / 8
    )
    if not rate:
        raise ValueError("takes a rate above 0")
    return rate


_LEAVES: Mapping[str, Callable[[object], Any]] = {
    "machines": _cluster_file_count,
    "cards_per_machine": _cluster_file_count,
    "card": _cluster_file_text,
    "memory": _cluster_file_size,
    "bandwidth": _cluster_file_rate,
    "host_memory": _cluster_file_size,
    "check": _cluster_file_text,
    "price": _cluster_file_number,
    **{f"tflops.{one}": _positive for one in _TYPES},
    "links.within.bandwidth": _cluster_file_rate,
    "links.within.latency_s": _cluster_file_number,
    "links.between.bandwidth": _cluster_file_rate,
    "links.between.latency_s": _cluster_file_number,
}
_SECTIONS = ("tflops", "links", "links.within", "links.between")


def read_cluster_file(path: Path) -> Hardware:
    """Read a cluster file; raise all its errors at once, with line and column."""
    reader = _Reader(path)
    reader.read()
    if not reader.mistakes and "card" not in reader.values:
        reader.mistakes.append(
            Mistake(where=str(path), what="card is missing", fix="write for example: card: H100")
        )
    if not reader.mistakes:
        hardware = reader.hardware()
        if hardware is not None and not reader.mistakes:
            return hardware
    raise ConfigError(reader.mistakes)


class _Reader:
    """Collect values and errors from one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.mistakes: list[Mistake] = []

    def read(self) -> None:
        """Read all values."""
        try:
            root = yaml12.compose(
                untrusted.read_bounded(self.path, _MOST_BYTES).decode("utf-8-sig")
            )
        except OSError as error:
            self._mistake(str(self.path), f"cannot be read: {error.strerror or error}")
        except UnicodeDecodeError:
            self._mistake(str(self.path), "is not UTF-8 text")
        except untrusted.Unreadable:
            self._mistake(
                str(self.path),
                f"is not a cluster file: not a regular file, or larger than {_MOST_BYTES // KiB} KiB",
            )
        except yaml12.Unreadable as error:
            self._mistake(f"{self.path}{error.place}", str(error))
        else:
            if root is not None:
                self._mapping(root, "")

    def _mapping(self, node: "Node", prefix: str) -> None:
        from ruamel.yaml.nodes import MappingNode

        if not isinstance(node, MappingNode):
            whose = f"{prefix.rstrip('.')} takes" if prefix else "a cluster file takes"
            self._mistake(self._where(node), f"{whose} `key: value` lines")
            return
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if name in self.places:
                self._mistake(self._where(key), f"{name} is given twice")
            self.places[name] = self._where(value)
            if name in _SECTIONS:
                self._mapping(value, f"{name}.")
            elif name not in _LEAVES:
                near = fields.suggest_name(name, [*_LEAVES, *_SECTIONS])
                self._mistake(self._where(key), f"{name} is not a key of a cluster file", near)
            else:
                self._value(name, value)

    def _value(self, name: str, node: "Node") -> None:
        try:
            self.values[name] = _LEAVES[name](yaml12.value_of(node))
        except ValueError as error:
            what = str(error)
            self._mistake(self._where(node), f"{name} {what}" if what.startswith("takes") else what)

    def hardware(self) -> Hardware | None:
        """Return the described hardware, with the catalogue's figures as defaults."""
        values = self.values
        known = catalogue.find_gpu(values["card"])
        card = self._card(known)
        if card is None:
            return None
        each = values.get("cards_per_machine", known.cards_per_machine if known else 1)
        usual = known.network_bytes_s if known else 1.25e9
        is_shared = known is None or known.network_is_shared
        own = usual / (each if is_shared else 1)
        within = known.within if known else Link(latency_s=2.5e-6, bytes_s=16e9, source="assumed")
        between = Link(latency_s=4e-6, bytes_s=own, source=f"assumed: usual for {card.name}")
        if "check" in values:
            within, between = self._measured(within, between, each, is_shared)
        return Hardware(
            card=card,
            machines=values.get("machines", 1),
            cards_per_machine=each,
            within=self._link("within", within),
            between=self._link("between", between),
            host_memory_bytes=values.get("host_memory"),
            price_per_card_hour=values.get("price"),
            assumed=known.said if known else (),
        )

    def _card(self, known: catalogue.KnownGpu | None) -> Gpu | None:
        values, where = self.values, str(self.path)
        flops = {one: values[f"tflops.{one}"] * 1e12 for one in _TYPES if f"tflops.{one}" in values}
        if known is None:
            if "memory" not in values:
                place = self.places["card"]
                near = ", ".join(catalogue.known_gpus())
                self._mistake(
                    place,
                    f"{values['card']} is not in the catalogue, and memory is missing",
                    f"write its memory, bandwidth and tflops, or use one of: {near}",
                )
                return None
            return Gpu(
                name=values["card"],
                memory_bytes=values["memory"],
                flops=flops,
                bandwidth_bytes_s=values.get("bandwidth"),
                source=where,
            )
        card = known.card
        written = {"memory", "bandwidth"} & values.keys() or flops
        return dataclasses.replace(
            card,
            memory_bytes=values.get("memory", card.memory_bytes),
            flops={**card.flops, **flops},
            bandwidth_bytes_s=values.get("bandwidth", card.bandwidth_bytes_s),
            source=f"{card.source}, and {where}" if written else card.source,
        )

    def _link(self, which: str, link: Link) -> Link:
        bandwidth = self.values.get(f"links.{which}.bandwidth")
        latency = self.values.get(f"links.{which}.latency_s")
        if bandwidth is None and latency is None:
            return link
        return Link(
            latency_s=link.latency_s if latency is None else latency,
            bytes_s=link.bytes_s if bandwidth is None else bandwidth,
            source=str(self.path),
        )

    def _measured(
        self, within: Link, between: Link, each: int, is_shared: bool
    ) -> tuple[Link, Link]:
        path = self.path.parent / self.values["check"]
        try:
            found = read_measured_links(path, cards_per_machine=each, network_is_shared=is_shared)
        except ValueError as error:
            self._mistake(self.places["check"], str(error))
            return within, between
        return found.within or within, found.between or between

    def _where(self, node: "Node") -> str:
        return f"{self.path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def _mistake(self, where: str, what: str, fix: str = "") -> None:
        self.mistakes.append(Mistake(where=where, what=what, fix=fix))


_COUNTED = re.compile(r"(\d{1,7})\s*[x×*]\s*(?:(\d{1,7})\s*[x×*]\s*)?(\S.*)", re.IGNORECASE)
# Latency of a network step in NCCL's model (src/graph/tuning.cc, Ring LL128).
NETWORK_LATENCY_S = 4.0e-6


def parse_hardware(text: str) -> Hardware:
    """Parse ``H100``, ``8xH100``, ``2x8xH100`` or the path of a cluster file."""
    text = text.strip()
    if text.lower().endswith((".yaml", ".yml")) or Path(text).is_file():
        return read_cluster_file(Path(text))
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        return hardware_of(text, machines=1, cards_per_machine=1)
    first, second, name = int(counted[1]), counted[2], counted[3]
    if not first or (second is not None and not int(second)):
        raise Impossible(
            f"{text} is not valid hardware",
            why="it needs at least one GPU",
            fix="write for example 8xH100, or 2x8xH100 for two machines",
        )
    if second is not None:
        return hardware_of(name, machines=first, cards_per_machine=int(second))
    return _spread(name, first)


def hardware_of(
    name: str, *, machines: int, cards_per_machine: int, assumed: tuple[str, ...] = ()
) -> Hardware:
    """Return machines with GPUs of the catalogue, connected as such GPUs usually are."""
    known = catalogue.known_gpu(name)
    card = known.card
    own = known.network_bytes_s / (cards_per_machine if known.network_is_shared else 1)
    said = [*assumed, *known.said]
    if _cluster_file_plain(card.name) != _cluster_file_plain(name):
        said.append(f"{name} is interpreted as {card.name}")
    if machines > 1:
        whose = "for all its GPUs" if known.network_is_shared else "for each GPU"
        gbits = known.network_bytes_s * 8 / 1e9
        said.append(f"each machine has a network of {gbits:.0f} Gbit/s {whose}")
    return Hardware(
        card=card,
        machines=machines,
        cards_per_machine=cards_per_machine,
        within=known.within,
        between=Link(
            latency_s=NETWORK_LATENCY_S,
            bytes_s=own,
            source=f"assumed: {known.network_bytes_s * 8 / 1e9:.0f} Gbit/s, usual for {card.name}",
        ),
        assumed=tuple(said),
    )


def describe_hardware(hardware: Hardware) -> str:
    """Describe hardware in one line: ``2 machines with 8 x H100 each``."""
    cards = f"{hardware.cards_per_machine} x {hardware.card.name}"
    if hardware.card.kind == "cpu":
        each = (
            "1 rank" if hardware.cards_per_machine == 1 else f"{hardware.cards_per_machine} ranks"
        )
        cards = f"{each} on {hardware.card.name}"
    return cards if hardware.machines == 1 else f"{hardware.machines} machines with {cards} each"


def _spread(name: str, count: int) -> Hardware:
    """Spread GPUs over machines of the usual size, or the next smaller size that divides evenly."""
    usual = catalogue.known_gpu(name).cards_per_machine
    # One machine can have more than the usual number, except where a GPU is a whole machine.
    if count == 1 or (usual > 1 and count <= max(usual, 8)):
        return hardware_of(name, machines=1, cards_per_machine=count)
    each = next(number for number in range(usual, 0, -1) if count % number == 0)
    said = f"{count} GPUs are assumed to be {count // each} machines with {each} each"
    return hardware_of(name, machines=count // each, cards_per_machine=each, assumed=(said,))


def _cluster_file_plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
