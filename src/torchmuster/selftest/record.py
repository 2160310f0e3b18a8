"""The result file of a self-test: what was checked on which hardware, without names of hosts or users."""

import getpass
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from torchmuster import __version__, untrusted
from torchmuster.errors import Impossible
from torchmuster.redaction import harmless, redact_text
from torchmuster.runfolder import write_atomically
from torchmuster.selftest.check import Figure
from torchmuster.selftest.hardware import Hardware

FORMAT = 1
Verdict = Literal["confirmed", "refuted", "not run", "broken"]
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{9,}", re.IGNORECASE)
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check found, or why it did not run."""

    id: str
    verdict: Verdict
    says: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SelftestRecord:
    """A whole self-test. ``planted`` says that every check ran with its planted fault and should be refuted."""

    format: int
    made: str  # UTC
    torchmuster: str
    device: Literal["cpu", "gpu"]
    ranks: int
    has: tuple[str, ...]
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    minutes: float
    checks: tuple[CheckResult, ...]
    planted: bool = False


def make_record(
    here: Hardware, checks: Sequence[CheckResult], *, seconds: float, planted: bool
) -> SelftestRecord:
    """Return the record of checks that ran here."""
    return SelftestRecord(
        format=FORMAT,
        made=time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        torchmuster=__version__,
        device=here.device,
        ranks=here.ranks,
        has=here.has,
        hardware=here.description,
        versions=here.versions,
        minutes=round(seconds / 60, 1),
        checks=tuple(checks),
        planted=planted,
    )


def write_record(path: Path, record: SelftestRecord) -> None:
    """Write the record as JSON, without secrets, addresses, and names of hosts, users and folders."""
    text = json.dumps(_anonymous(asdict(record)), indent=1, ensure_ascii=False)
    write_atomically(path, text + "\n")


def read_record(path: Path) -> SelftestRecord:
    """Read a result file that somebody sent."""
    try:
        record = msgspec.convert(untrusted.read_json(path), SelftestRecord)
    except (OSError, ValueError) as error:
        raise Impossible(
            f"{path} is not a result file of muster selftest", why=str(error)
        ) from error
    if record.format != FORMAT:
        raise Impossible(f"{path} has format {record.format}, not {FORMAT}")
    return record


def _anonymous(value: Any) -> Any:
    if isinstance(value, str):
        return _without_names(value)
    if isinstance(value, Mapping):
        return {name: _anonymous(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_anonymous(one) for one in value]
    return value


def _without_names(text: str) -> str:
    text = _ADDRESS.sub("ADDRESS", _UUID.sub(r"\1-…", redact_text(harmless(text))))
    for name, instead in _names_here().items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _names_here() -> dict[str, str]:
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        user = ""
    found = {str(Path.home()): "HOME", host: "HOST", host.partition(".")[0]: "HOST"}
    if user not in ("", "root"):
        found[user] = "USER"
    return {name: instead for name, instead in found.items() if len(name) > 2}
