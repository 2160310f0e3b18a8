"""Limits of this process: open files, locked memory, processes, file size."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchmuster.devices.readers import sysfs
from torchmuster.devices.readers.cpu import cgroup_folders
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.units import GiB, format_bytes

_LINE = re.compile(r"^(Max [a-z ]+?)\s{2,}(\S+)\s+(\S+)", re.MULTILINE)
# The usual default; DataLoader workers need an open file per shared tensor.
_USUAL_FILES = 1024
_WANTED_FILES = 65536
# RDMA pins its send buffers; NCCL alone needs more than this on a node with 8 GPUs.
_LOCKED_BYTES = GiB
# A rank with its threads and workers needs up to about 100.
_FEW_PROCESSES = 200


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """The soft limit and the hard limit; None is unlimited."""

    soft: int | None
    hard: int | None


def check_limits(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the limits of this process, which its children inherit."""
    limits = {
        name: _Limit(soft=_number(soft), hard=_number(hard))
        for name, soft, hard in _LINE.findall(surroundings.text("/proc/self/limits") or "")
    }
    findings = [
        *_open_files(limits),
        *_locked_memory(limits, surroundings),
        *_pids(surroundings),
        *_sizes(limits),
    ]
    files = limits.get("Max open files")
    seen = (
        f"{_message(files.soft)} open files, other limits sufficient" if files else "not readable"
    )
    yield from findings or [Finding(name="limits", status=Status.OK, what=seen)]


def _number(word: str) -> int | None:
    return int(word) if word.isdecimal() else None


def _message(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,}"


def _raising(option: str, name: str, value: str, docker: str, systemd: str) -> str:
    """Return how to raise a limit: in this shell, permanently, in Docker and for a service."""
    return (
        f"ulimit -{option} {value}  # in this shell\n"
        f"echo '* - {name} {value}' | sudo tee /etc/security/limits.d/90-{name}.conf  # "
        "permanently, after the next login\n"
        f"docker run --ulimit {name}={docker} …\n"
        f"{systemd}  # in the [Service] section of a systemd unit, e.g. slurmd's"
    )


def _open_files(limits: Mapping[str, _Limit]) -> Iterator[Finding]:
    limit = limits.get("Max open files")
    if limit is None or limit.soft is None or limit.soft > _USUAL_FILES:
        return
    within = _WANTED_FILES if limit.hard is None else min(limit.hard, _WANTED_FILES)
    raising = _raising(
        "n", "nofile", str(_WANTED_FILES), str(_WANTED_FILES), f"LimitNOFILE={_WANTED_FILES}"
    )
    if _USUAL_FILES < within < _WANTED_FILES:
        raising = f"ulimit -n {within}  # your hard limit\n{raising.partition(chr(10))[2]}"
    elif within <= _USUAL_FILES:  # only root can raise the hard limit
        raising = raising.partition("\n")[2]
    low = limit.soft < _USUAL_FILES
    yield finding(
        "open-files-low",
        status=Status.WARNING if low else Status.NOTE,
        soft=limit.soft,
        raising=raising,
        hard=_message(limit.hard),
    )


def _locked_memory(limits: Mapping[str, _Limit], surroundings: Surroundings) -> Iterator[Finding]:
    limit = limits.get("Max locked memory")
    cards = [
        name
        for name in sysfs.read_names(surroundings.path("/dev/infiniband"))
        if name.startswith("uverbs")
    ]
    if not cards or limit is None or limit.soft is None or limit.soft >= _LOCKED_BYTES:
        return
    yield finding(
        "locked-memory-low",
        soft=format_bytes(limit.soft),
        fix=_raising("l", "memlock", "unlimited", "-1", "LimitMEMLOCK=infinity"),
        limit_soft=limit.soft,
        cards=cards[0],
    )


def _pids(surroundings: Surroundings) -> Iterator[Finding]:
    for folder in cgroup_folders("pids", surroundings.path("/proc"), surroundings.path("/sys")):
        most, used = (
            sysfs.read_integer(folder / "pids.max"),
            sysfs.read_integer(folder / "pids.current"),
        )
        if most is None or most - (used or 0) >= _FEW_PROCESSES:
            continue
        yield finding("pids-few", most=most, used=used or 0)
        return


def _sizes(limits: Mapping[str, _Limit]) -> Iterator[Finding]:
    file = limits.get("Max file size")
    if file and file.soft is not None:
        yield finding("file-size-limited", soft=format_bytes(file.soft), bytes=file.soft)


CHECKS = (
    Check(
        name="limits",
        asks="Are the process limits high enough for ranks and their workers?",
        run=check_limits,
        systems=("linux",),
    ),
)
