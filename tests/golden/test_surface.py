"""What scripts of users rely on: exit codes and settings. The public names are in src/torchmuster/__init__.pyi.

If a change is meant, run ``pytest tests/golden --snapshot-update`` and read the difference.
"""

import pytest
from syrupy.assertion import SnapshotAssertion

from text_snapshots import TextFile
from torchmuster.config import fields
from torchmuster.config.layers import variable_name
from torchmuster.errors import EXIT_CODE_MEANINGS


@pytest.fixture
def surface(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(TextFile)


def test_exit_codes(surface: SnapshotAssertion) -> None:
    lines = [f"{code.value} {code.name}: {text}" for code, text in EXIT_CODE_MEANINGS.items()]
    assert "\n".join(lines) + "\n" == surface


def test_settings(surface: SnapshotAssertion) -> None:
    lines = [
        f"{path} = {leaf.default} ${variable_name(path)}" for path, leaf in fields.leaves().items()
    ]
    assert "\n".join(lines) + "\n" == surface
