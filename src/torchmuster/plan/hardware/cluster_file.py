"""A cluster described in a YAML file.

::

    machines: 4
    cards_per_machine: 8
    card: H100              # a name of the catalogue; or any, with memory, bandwidth and tflops
    memory: 79GiB           # of a card, where it differs
    bandwidth: 3350GB/s     # of a card's memory
    tflops: {bfloat16: 989, float32: 67}
    host_memory: 2TiB       # of a machine
    links:
      within: {bandwidth: 450GB/s, latency_s: 2e-6}    # between two cards of a machine
      between: {bandwidth: 400Gbit/s, latency_s: 4e-6} # of one card, to other machines
    check: runs/20260102-check/check.json  # or what muster check measured, or muster bench collectives (record.json)
    price: 2.50             # of a card, for an hour

Everything but ``card`` may be left out: then it is what the catalogue says.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmuster.config import fields, yaml12
from torchmuster.errors import ConfigError, Mistake
from torchmuster.plan.hardware import catalogue, measured_links
from torchmuster.plan.hardware.model import Card, Hardware, Link
from torchmuster.units import parse_bytes

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

# A small b means bits, a large one bytes.
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgtKMGT]?)([Bb]its?|b|i?B)\s*/\s*s\s*")
_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TYPES = ("float32", "bfloat16", "float16")


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("takes a whole number of at least 1")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise ValueError("takes a number of at least 0")
    return float(value)


def _positive(value: object) -> float:
    number = _number(value)
    if not number:
        raise ValueError("takes a number above 0")
    return number


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("takes a text")
    return str(value)


def _size(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError("takes a size with its unit, such as 79GiB")
    size = parse_bytes(value)
    if not size:
        raise ValueError("takes a size above 0, such as 79GiB")
    return size


def _rate(value: object) -> float:
    """Read ``450GB/s`` or ``400Gbit/s`` as bytes in a second."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("takes bytes or bits in a second, such as 450GB/s or 400Gbit/s")
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
    "machines": _count,
    "cards_per_machine": _count,
    "card": _text,
    "memory": _size,
    "bandwidth": _rate,
    "host_memory": _size,
    "check": _text,
    "price": _number,
    **{f"tflops.{one}": _positive for one in _TYPES},
    "links.within.bandwidth": _rate,
    "links.within.latency_s": _number,
    "links.between.bandwidth": _rate,
    "links.between.latency_s": _number,
}
_SECTIONS = ("tflops", "links", "links.within", "links.between")


def read(path: Path) -> Hardware:
    """Read a cluster file; every mistake in it is told with its place."""
    reader = _Reader(path)
    reader.read()
    if not reader.mistakes and "card" not in reader.values:
        reader.mistakes.append(
            Mistake(where=str(path), what="card is missing", fix="write for example card: H100")
        )
    if not reader.mistakes:
        hardware = reader.hardware()
        if hardware is not None and not reader.mistakes:
            return hardware
    raise ConfigError(reader.mistakes)


class _Reader:
    """Collects values and mistakes from one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.mistakes: list[Mistake] = []

    def read(self) -> None:
        """Read all values."""
        try:
            root = yaml12.compose(self.path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            self._mistake(str(self.path), f"cannot be read: {error.strerror or error}")
        except UnicodeDecodeError:
            self._mistake(str(self.path), "is not UTF-8 text")
        except yaml12.Unreadable as error:
            self._mistake(f"{self.path}{error.place}", str(error))
        else:
            if root is not None:
                self._mapping(root, "")

    def _mapping(self, node: "Node", prefix: str) -> None:
        from ruamel.yaml.nodes import MappingNode

        if not isinstance(node, MappingNode):
            whose = f"{prefix.rstrip('.')} holds" if prefix else "a cluster file is made of"
            self._mistake(self._where(node), f"{whose} `key: value` lines")
            return
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if name in self.places:
                self._mistake(self._where(key), f"{name} is written twice")
            self.places[name] = self._where(value)
            if name in _SECTIONS:
                self._mapping(value, f"{name}.")
            elif name not in _LEAVES:
                near = fields.suggest(name, [*_LEAVES, *_SECTIONS])
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
        """Return what is described, with the catalogue's figures where nothing is written."""
        values = self.values
        known = catalogue.find(values["card"])
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

    def _card(self, known: catalogue.Known | None) -> Card | None:
        values, where = self.values, str(self.path)
        flops = {one: values[f"tflops.{one}"] * 1e12 for one in _TYPES if f"tflops.{one}" in values}
        if known is None:
            if "memory" not in values:
                place = self.places["card"]
                near = ", ".join(catalogue.names())
                self._mistake(
                    place,
                    f"{values['card']} is not in the catalogue, and memory is not written",
                    f"write memory, bandwidth and tflops of it, or take one of: {near}",
                )
                return None
            return Card(
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
            found = measured_links.read(path, cards_per_machine=each, network_is_shared=is_shared)
        except ValueError as error:
            self._mistake(self.places["check"], str(error))
            return within, between
        return found.within or within, found.between or between

    def _where(self, node: "Node") -> str:
        return f"{self.path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def _mistake(self, where: str, what: str, fix: str = "") -> None:
        self.mistakes.append(Mistake(where=where, what=what, fix=fix))
