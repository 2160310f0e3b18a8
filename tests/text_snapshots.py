"""Keep snapshots stable and readable. A pytest plugin that extends syrupy's fixture ``snapshot``.

``assert finding == snapshot`` (also a list of findings, or a ``MusterError``) compares the name and the text as a
terminal shows it; lines are not wrapped. What differs from run to run has a name: the test's temporary folder is TMP,
this Python PYTHON, a run's id DATE-TIME-name-ID, a checkpoint's step-00000010-ID. A text that other tools read has a
file of its own: ``assert script == snapshot.use_extension(TextFile)``. Renew them all with ``--snapshot-update``.
"""

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, from_error, render

_DIFFERS = {
    re.compile(r"\b20\d{6}-\d{6}-([a-z0-9-]+)-[0-9a-f]{4}\b"): r"DATE-TIME-\1-ID",
    re.compile(r"\b(step-\d{8})-[0-9a-f]{4}\b"): r"\1-ID",
}


class TextFile(SingleFileSnapshotExtension):
    """Keep each snapshot as a plain text file, named by its test."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


@pytest.fixture
def snapshot(
    request: pytest.FixtureRequest, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> SnapshotAssertion:
    monkeypatch.setenv("COLUMNS", "400")
    folder = ""
    if "tmp_path" in request.fixturenames:
        folder = str(request.getfixturevalue("tmp_path"))

    def steady(text: str) -> str:
        text = text.replace(folder, "TMP") if folder else text
        text = text.replace(sys.executable, "PYTHON")
        for pattern, name in _DIFFERS.items():
            text = pattern.sub(name, text)
        return text

    def as_text(findings: Iterable[Finding]) -> str:
        return "\n".join(_as_text(finding, steady) for finding in findings)

    def readable(*, data: Any, path: Any) -> Any:
        match data:
            case str():
                return steady(data)
            case Finding():
                return as_text([data])
            case MusterError():
                return as_text(from_error(data))
            case [Finding(), *_]:
                return as_text(data)
        return data

    return snapshot.with_defaults(matcher=readable)


def _as_text(finding: Finding, clean: Callable[[str], str]) -> str:
    finding = replace(
        finding,
        what=clean(finding.what),
        why=clean(finding.why),
        fix=clean(finding.fix),
        evidence=clean(finding.evidence),
    )
    return f"[{finding.name}]\n{render([finding])}"
