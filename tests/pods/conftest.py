"""Markers of the tests with pods, and why they are skipped."""

import os
import shutil
from pathlib import Path

import pytest

from pods.podman import INSTALL, NEEDS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_pods_are_impossible()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.pods)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def why_pods_are_impossible() -> str | None:
    if os.geteuid() != 0:
        return "the lab creates networks and mounts: run the tests as root"
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    missing = [name for name in NEEDS if shutil.which(name, path=path) is None]
    return f"missing: {', '.join(missing)}; {INSTALL}" if missing else None
