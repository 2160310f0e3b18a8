import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("promtool") is None:
        missing = pytest.mark.skip(reason="missing: promtool; apt-get install prometheus")
        for item in items:
            if item.get_closest_marker("prometheus"):
                item.add_marker(missing)
