"""Hardware as people write it: ``8xH100``, ``2x8xA100-80GB``, or a cluster file."""

import re
from pathlib import Path

from torchmuster.errors import Impossible
from torchmuster.plan.hardware import catalogue, cluster_file
from torchmuster.plan.hardware.model import Hardware, Link

_COUNTED = re.compile(r"(\d{1,7})\s*[x×*]\s*(?:(\d{1,7})\s*[x×*]\s*)?(\S.*)", re.IGNORECASE)
# What NCCL's model takes for a step through the network (src/graph/tuning.cc, Ring LL128).
NETWORK_LATENCY_S = 4.0e-6


def parse(text: str) -> Hardware:
    """Return the hardware that a text means."""
    text = text.strip()
    if text.lower().endswith((".yaml", ".yml")) or Path(text).is_file():
        return cluster_file.read(Path(text))
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        return of_cards(text, machines=1, cards_per_machine=1)
    first, second, name = int(counted[1]), counted[2], counted[3]
    if not first or (second is not None and not int(second)):
        raise Impossible(
            f"asked for the hardware {text}",
            why="there must be at least one card",
            fix="write for example 8xH100, or 2x8xH100 for two machines",
        )
    if second is not None:
        return of_cards(name, machines=first, cards_per_machine=int(second))
    return _spread(name, first)


def of_cards(
    name: str, *, machines: int, cards_per_machine: int, assumed: tuple[str, ...] = ()
) -> Hardware:
    """Return machines with catalogued cards, joined as such cards usually are."""
    known = catalogue.known(name)
    card = known.card
    own = known.network_bytes_s / (cards_per_machine if known.network_is_shared else 1)
    said = [*assumed, *known.said]
    if _plain(card.name) != _plain(name):
        said.append(f"{name} is taken as {card.name}")
    if machines > 1:
        whose = "for all its cards" if known.network_is_shared else "for each card"
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


def in_words(hardware: Hardware) -> str:
    """Return it as one line: ``2 machines with 8 x H100 each``."""
    cards = f"{hardware.cards_per_machine} x {hardware.card.name}"
    if hardware.card.kind == "cpu":
        each = (
            "1 rank" if hardware.cards_per_machine == 1 else f"{hardware.cards_per_machine} ranks"
        )
        cards = f"{each} on {hardware.card.name}"
    return cards if hardware.machines == 1 else f"{hardware.machines} machines with {cards} each"


def _spread(name: str, count: int) -> Hardware:
    """Return so many cards on machines with as many as are usual, or the next smaller number that goes."""
    usual = catalogue.known(name).cards_per_machine
    # More than are usual can be in one machine, except where a card is a machine of its own.
    if count == 1 or (usual > 1 and count <= max(usual, 8)):
        return of_cards(name, machines=1, cards_per_machine=count)
    each = next(number for number in range(usual, 0, -1) if count % number == 0)
    said = f"{count} cards are taken as {count // each} machines with {each} each"
    return of_cards(name, machines=count // each, cards_per_machine=each, assumed=(said,))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
