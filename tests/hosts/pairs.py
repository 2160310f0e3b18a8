"""Two faults of the catalogue at once, on four hosts: the second is moved to hosts of its own."""

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hosts.catalogue import ALL, Catalogued

HOSTS = 4
# The first fault stays where it is, on node2; the first machine is the same for both.
_MOVED = {
    "node2": "node3",
    "node3": "node4",
    "10.77.0.12": "10.77.0.13",
    "10.77.0.13": "10.77.0.14",
}


def random_pairs(count: int, seed: int) -> Iterator[tuple[Catalogued, Catalogued]]:
    """Yield pairs of which neither hides the other."""
    chance = random.Random(seed)
    alone = [
        one
        for one in ALL
        # What keeps every machine from coming hides all else.
        if not one.host_words and one.hosts < HOSTS and not _hides_all(one)
    ]
    while count:
        first, second = chance.sample(alone, 2)
        second = moved(second)
        if not _hosts(first) & _hosts(second):
            count -= 1
            yield first, second


def moved(fault: Catalogued) -> Catalogued:
    """Return the same fault on other hosts."""
    return dataclasses.replace(
        fault,
        faults=[_moved(one, _MOVED) for one in fault.faults],
        says=[re.sub("|".join(_MOVED), lambda old: _MOVED[old[0]], word) for word in fault.says],
        mended_by=None,
    )


def _moved(fault: Any, names: Mapping[str, str]) -> Any:
    fields: dict[str, Any] = {
        field.name: names[value]
        for field in dataclasses.fields(fault)
        if field.name in ("host", "target") and (value := getattr(fault, field.name)) in names
    }
    return dataclasses.replace(fault, **fields)


def _hides_all(fault: Catalogued) -> bool:
    everywhere = any(getattr(one, "host", "") is None for one in fault.faults)
    return everywhere or fault.finding.startswith("own-")


def _hosts(fault: Catalogued) -> set[str]:
    return {one.host for one in fault.faults if hasattr(one, "host")}
