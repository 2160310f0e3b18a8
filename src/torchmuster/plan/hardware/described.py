"""Hardware by name, such as ``2x8xH100``, and its description in one line."""

import re

from torchmuster.errors import Impossible
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Hardware, Link

_COUNTED = re.compile(r"(\d{1,7})\s*[x×*]\s*(?:(\d{1,7})\s*[x×*]\s*)?(\S.*)", re.IGNORECASE)
# Latency of a network step in NCCL's model (src/graph/tuning.cc, Ring LL128).
_NETWORK_LATENCY_S = 4.0e-6


def parse_hardware(text: str) -> Hardware:
    """Parse ``H100``, ``8xH100`` or ``2x8xH100``."""
    text = text.strip()
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
    said = [*assumed]
    if _plain(card.name) != _plain(name):
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
            latency_s=_NETWORK_LATENCY_S,
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


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
