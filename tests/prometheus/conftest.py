from pathlib import Path

import pytest

from prometheus import prometheus_lab

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = prometheus_lab.missing()
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.prometheus)
            if missing:
                reason = f"missing: {', '.join(missing)}; {prometheus_lab.INSTALL}"
                item.add_marker(pytest.mark.skip(reason=reason))
