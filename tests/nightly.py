"""Mark single cases of a test: those that no change needs run every night only."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def nightly_except(each_change: Collection[str], cases: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a test, named by their keys; only ``each_change`` runs in CI."""
    unknown = set(each_change) - cases.keys()
    if unknown:
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}")
    params = []
    for name, case in cases.items():
        marks = () if name in each_change else (pytest.mark.nightly,)
        params.append(pytest.param(case, id=name, marks=marks))
    return params
