"""The result file of a self-test: what was checked on which hardware, without names of hosts or users."""

import contextlib
import getpass
import ipaddress
import json
import re
import socket
import sys
import tempfile
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
_FIRST_PERSON = 1000  # lower user ids belong to services
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F:]*:[0-9a-fA-F:]*)(?![\w:])"
)


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


def write_record(path: Path, record: SelftestRecord, *, hosts: Sequence[str] = ()) -> None:
    """Write the record as JSON, without secrets, addresses, and names of hosts, users and folders."""
    names = _names_here(hosts)
    text = json.dumps(_anonymous(asdict(record), names), indent=1, ensure_ascii=False)
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


def _anonymous(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _without_names(value, names)
    if isinstance(value, Mapping):
        return {name: _anonymous(one, names) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_anonymous(one, names) for one in value]
    return value


def _without_names(text: str, names: Mapping[str, str]) -> str:
    text = redact_text(harmless(text))
    for name, instead in names.items():  # a host also with its domain
        domain = r"(?:\.[\w-]+)*" if instead == "HOST" else ""
        text = re.sub(rf"(?<![\w-]){re.escape(name)}{domain}(?![\w-])", instead, text)
    return _ADDRESS.sub(_without_address, _UUID.sub(r"\1-…", text))


def _without_address(found: re.Match[str]) -> str:
    try:
        ipaddress.ip_address(found[0])
    except ValueError:
        return found[0]
    return "ADDRESS"


def _people() -> set[str]:
    try:
        import pwd
    except ImportError:  # Windows
        return set()
    return {one.pw_name for one in pwd.getpwall() if one.pw_uid >= _FIRST_PERSON}


def _names_here(hosts: Sequence[str]) -> dict[str, str]:
    """Return what to replace, longest first: folders, hosts, and people who have a home here."""
    folders = (sys.prefix, sys.base_prefix, str(Path.cwd()), tempfile.gettempdir())
    found = dict.fromkeys(folders, "FOLDER")
    found[str(Path.home())] = "HOME"
    for host in (socket.gethostname(), *(one.rpartition("@")[2] for one in hosts)):
        name = host.partition(":")[0]
        found |= {name: "HOST", name.partition(".")[0]: "HOST"}
    users = _people()
    users |= {user for one in hosts if (user := one.rpartition("@")[0])}
    with contextlib.suppress(KeyError, OSError):  # a user without a name, as in containers
        users.add(getpass.getuser())
    found |= {user: "USER" for user in users if user not in ("root", "nobody")}
    known = [name for name in found if len(name) > 2]
    return {name: found[name] for name in sorted(known, key=len, reverse=True)}
