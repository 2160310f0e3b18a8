"""Hardware by name, such as ``2x8xH100``, and its description in one line."""

import re

from torchmuster.errors import Impossible
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Hardware

_COUNTED = re.compile(r"(\d{1,7})\s*[x×*]\s*(?:(\d{1,7})\s*[x×*]\s*)?(\S.*)", re.IGNORECASE)


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
    usual = catalogue.known_gpu(name).cards_per_machine
    # One machine can have more than the usual number, except where a GPU is a whole machine.
    if first == 1 or (usual > 1 and first <= max(usual, 8)):
        return hardware_of(name, machines=1, cards_per_machine=first)
    each = usual
    while first % each:
        each -= 1
    assumed = f"{first} GPUs are assumed to be {first // each} machines with {each} each"
    return hardware_of(name, machines=first // each, cards_per_machine=each, assumed=(assumed,))


def hardware_of(
    name: str, *, machines: int, cards_per_machine: int, assumed: tuple[str, ...] = ()
) -> Hardware:
    """Return machines with GPUs of the catalogue, connected as such GPUs usually are."""
    known = catalogue.known_gpu(name)
    sentences = [*assumed]
    if _plain(known.card.name) != _plain(name):
        sentences.append(f"{name} is interpreted as {known.card.name}")
    if machines > 1:
        whose = "for all its GPUs" if known.network_is_shared else "for each GPU"
        gbits = known.network_bytes_s * 8 / 1e9
        sentences.append(f"each machine has a network of {gbits:.0f} Gbit/s {whose}")
    return Hardware(
        card=known.card,
        machines=machines,
        cards_per_machine=cards_per_machine,
        within_bytes_s=known.within_bytes_s,
        between_bytes_s=known.network_bytes_s
        / (cards_per_machine if known.network_is_shared else 1),
        assumed=tuple(sentences),
    )


def describe_hardware(hardware: Hardware) -> str:
    """Describe hardware in one line: ``2 machines with 8 x H100 each``."""
    count, name = hardware.cards_per_machine, hardware.card.name
    cards = f"{count} x {name}"
    if hardware.card.kind == "cpu":
        cards = f"{count} {'rank' if count == 1 else 'ranks'} on {name}"
    return cards if hardware.machines == 1 else f"{hardware.machines} machines with {cards} each"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
