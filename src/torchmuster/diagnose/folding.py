"""What was found on many machines, told once: ``node1 and node3: …``."""

import dataclasses
from collections.abc import Mapping, Sequence

from torchmuster.finding import Finding, Status
from torchmuster.launch.network.reach import several


def fold(found: Mapping[str, Sequence[Finding]], *, named: bool = True) -> list[Finding]:
    """Return the findings of several machines, those that say the same as one; what is well is left out.

    With ``named``, each says first whose it is.
    """
    machines: dict[tuple[str, Status, str, str, str], dict[str, Finding]] = {}
    for name, findings in found.items():
        for one in findings:
            if one.status is not Status.OK:
                said = (one.name, one.status, one.what, one.why, one.fix)
                machines.setdefault(said, {})[name] = one
    return [_folded(one, named=named) for one in machines.values()]


def _folded(same: Mapping[str, Finding], *, named: bool) -> Finding:
    first = next(iter(same.values()))
    if not named:
        return first
    names = list(same)
    what = first.what if first.what.startswith(tuple(names)) else f"{several(names)}: {first.what}"
    seen: dict[str, list[str]] = {}
    for name, one in same.items():
        if one.evidence:
            seen.setdefault(one.evidence, []).append(name)
    evidence = next(iter(seen), "")
    if len(seen) > 1:
        evidence = "\n".join(f"{several(whose)}: {text}" for text, whose in seen.items())
    return dataclasses.replace(first, what=what, evidence=evidence)
