"""Find the differences between the hosts of a run before anything starts.

The first host is the reference. There is one finding for each kind of difference, however many hosts
have it.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

from torchmuster import __version__
from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.fingerprint import LEAST_TORCH, code_folder, torch_too_old
from torchmuster.launch.job import JobSpec
from torchmuster.launch.network.reach import name_several
from torchmuster.units import format_seconds

CLOCKS_APART_S = 5.0
_VALUES_SHOWN = 4
_LINES_SHOWN = 3
_SYSTEMS = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
_SAME_KIND = {"amd64": "x86_64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class NodeDescription:
    """A host of the run: its display name and what it reported.

    ``clock_offset_s`` is its clock minus the launcher's, measured when its record arrived.
    """

    name: str
    record: protocol.NodeRecord
    clock_offset_s: float | None = None
    fingerprint: protocol.Fingerprint | None = None


def compare_all_nodes(
    nodes: Sequence[NodeDescription],
    spec: JobSpec,
) -> list[Finding]:
    """Return the differences between the hosts and between the code they would run."""
    return [
        *_systems(nodes),
        *_torchmuster(nodes),
        *_torch(nodes),
        *_machine_kinds(nodes),
        *_pythons(nodes),
        *_compare_nodes_code([one for one in nodes if one.fingerprint is not None], spec),
        *_clocks(nodes),
    ]


def other_protocol(name: str, hello: protocol.Hello) -> protocol.Trouble:
    """Return the error for a host whose torchmuster has another protocol version."""
    return protocol.Trouble(
        name="other-protocol",
        what=f"torchmuster on {name} uses protocol {hello.protocol}, this host uses {protocol.PROTOCOL}",
        why=f"{name} has version {hello.record.torchmuster}, this host has {__version__}",
        fix=_install(__version__, "torchmuster", [name]),
        exit_code=ExitCode.IMPOSSIBLE,
    )


# ---- the hosts themselves


def _systems(nodes: Sequence[NodeDescription]) -> Iterator[Finding]:
    groups = _groups(nodes, lambda one: _SYSTEMS.get(one.record.system, one.record.system))
    if len(groups) > 1:
        yield Finding(
            name="mixed-operating-systems",
            status=Status.FAILURE,
            what=f"the hosts have different operating systems: {_shares(groups)}",
            why="gloo cannot connect ranks on different systems, and NCCL runs on Linux only",
            fix="run all hosts on Linux (on Windows, inside WSL2)\n"
            f"or use only hosts with the same system: {name_several(max(groups.values(), key=len))}",
        )


def _torchmuster(nodes: Sequence[NodeDescription]) -> Iterator[Finding]:
    groups = _groups(nodes, lambda one: one.record.torchmuster)
    if len(groups) > 1:
        yield Finding(
            name="torchmuster-version",
            status=Status.FAILURE,
            what=f"torchmuster versions differ: {_shares(groups)}",
            why="node agents of another version may misunderstand the launcher",
            fix=_install(next(iter(groups)), "torchmuster", _others(groups)),
        )


def _torch(nodes: Sequence[NodeDescription]) -> Iterator[Finding]:
    missing = [one.name for one in nodes if one.record.torch is None]
    having = [one for one in nodes if one.record.torch is not None]
    releases = _groups(having, lambda one: _release(one.record.torch))
    builds = _groups(having, lambda one: one.record.torch or "")
    if missing:
        yield Finding(
            name="torch-missing",
            status=Status.FAILURE,
            what=f"torch is not installed on {name_several(missing)}",
            why="the Python environment that runs torchmuster there does not contain torch",
            fix=_install(next(iter(releases), ""), "torch", missing),
        )
    old = [one.name for one in having if torch_too_old(one.record.torch or "")]
    if old:
        yield Finding(
            name="torch-too-old",
            status=Status.FAILURE,
            what=f"torch on {name_several(old)} is older than {LEAST_TORCH}",
            why=f"torchmuster uses features that older versions do not have: {_shares(releases)}",
            fix=f"python -m pip install 'torch>={LEAST_TORCH}'  # on {name_several(old)}",
        )
    elif len(releases) > 1:
        yield Finding(
            name="torch-version",
            status=Status.FAILURE,
            what=f"torch versions differ: {_shares(releases)}",
            why="different versions may connect and then hang, or compute different results",
            fix=_install(next(iter(releases)), "torch", _others(releases)),
        )
    elif len(builds) > 1:
        why = "the same release, built for different hardware"
        if any(version.endswith("+cpu") for version in builds):
            why += "; a +cpu build does not use GPUs"
        yield Finding(
            name="torch-build",
            status=Status.WARNING,
            what=f"torch builds differ: {_shares(builds)}",
            why=why,
        )


def _machine_kinds(nodes: Sequence[NodeDescription]) -> Iterator[Finding]:
    groups = _groups(nodes, lambda one: _compare_nodes_kind(one.record.machine.lower()))
    if len(groups) > 1:
        yield Finding(
            name="machine-kind",
            status=Status.WARNING,
            what=f"CPU architectures differ: {_shares(groups)}",
            why="the run works, but results may differ in the last digits, and all ranks wait for the slowest one",
        )


def _compare_nodes_kind(machine: str) -> str:
    return _SAME_KIND.get(machine, machine)


def _pythons(nodes: Sequence[NodeDescription]) -> Iterator[Finding]:
    groups = _groups(nodes, lambda one: ".".join(one.record.python.split(".")[:2]))
    if len(groups) > 1:
        yield Finding(
            name="python-version",
            status=Status.WARNING,
            what=f"Python versions differ: {_shares(groups)}",
            why="objects pickled by one rank may not unpickle on a rank with another Python version",
        )


def _clocks(nodes: Sequence[NodeDescription]) -> Iterator[Finding]:
    reference = nodes[0].clock_offset_s if nodes else None
    if reference is None:
        return
    apart = [
        f"{one.name} is {format_seconds(abs(offset))} {'ahead' if offset > 0 else 'behind'}"
        for one in nodes
        if one.clock_offset_s is not None
        and abs(offset := one.clock_offset_s - reference) > CLOCKS_APART_S
    ]
    if apart:
        yield Finding(
            name="clocks",
            status=Status.NOTE,
            what=f"clocks differ from the clock of {nodes[0].name}: {name_several(apart)}",
            why="timestamps in logs are off by this much; muster run is not affected, but plain torchrun may "
            "train on one host alone if the clocks differ by 16 s or more",
            fix="sudo timedatectl set-ntp true  # on these hosts",
        )


# ---- the code


def _compare_nodes_code(known: Sequence[NodeDescription], spec: JobSpec) -> Iterator[Finding]:
    script = f"module {spec.command[0]}" if spec.module else spec.command[0]
    kind = PureWindowsPath if "\\" in spec.folder else PurePosixPath
    folder = str(code_folder(kind(spec.folder, spec.command[0]), spec.module, spec.folder))
    missing = [one.name for one in known if not _script_of(one)]
    present = [one for one in known if _script_of(one)]
    # If no host has the module, Python's own error is clearer.
    if missing and (present or not spec.module):
        at_first = not _script_of(known[0])
        yield Finding(
            name="script-missing",
            status=Status.FAILURE,
            what=f"{script} does not exist on {name_several(missing)}",
            why=f"every host runs its own copy in {folder}",
            fix="check the path, or run muster in the folder that contains it"
            if at_first
            else _copy(known[0], missing, folder),
        )
    if present:
        yield from _different_code(present, script, folder)


def _different_code(
    present: Sequence[NodeDescription], script: str, folder: str
) -> Iterator[Finding]:
    first = present[0]
    other_script = [one.name for one in present if _script_of(one) != _script_of(first)]
    other_code = [
        one for one in present if _script_of(one) == _script_of(first) and _code_differs(first, one)
    ]
    if other_script:
        yield Finding(
            name="script-differs",
            status=Status.FAILURE,
            what=f"{script} on {name_several(other_script)} differs from the copy on {first.name}",
            why="ranks that run different code can hang in different collectives",
            fix=_copy(first, other_script, folder),
        )
    if other_code:
        names = [one.name for one in other_code]
        yield Finding(
            name="code-differs",
            status=Status.FAILURE,
            what=f"the code next to {script} on {name_several(names)} differs from the copy on {first.name}",
            why=f"Python files in {folder} differ: {_compare_nodes_files(first)}, {_compare_nodes_files(other_code[0])}",
            fix=_copy(first, names, folder),
        )


def _compare_nodes_files(one: NodeDescription) -> str:
    count = one.fingerprint.code_files if one.fingerprint is not None else 0
    return f"{count:,} files on {one.name}"


def _code_differs(first: NodeDescription, other: NodeDescription) -> bool:
    mine, theirs = first.fingerprint, other.fingerprint
    if mine is None or theirs is None or not mine.code_sha256 or not theirs.code_sha256:
        return False  # too large to compare
    return mine.code_sha256 != theirs.code_sha256


def _script_of(one: NodeDescription) -> str:
    return one.fingerprint.script_sha256 if one.fingerprint is not None else ""


# ---- how they are shown


def _groups(
    nodes: Sequence[NodeDescription], value: Callable[[NodeDescription], str]
) -> dict[str, list[str]]:
    """Return the host names by value, in the order in which the values appear."""
    found: dict[str, list[str]] = {}
    for one in nodes:
        found.setdefault(value(one), []).append(one.name)
    return found


def _others(groups: Mapping[str, Sequence[str]]) -> list[str]:
    _, *rest = groups.values()
    return [name for names in rest for name in names]


def _shares(groups: Mapping[str, Sequence[str]]) -> str:
    shown = [f"{value} on {name_several(names)}" for value, names in groups.items()]
    if len(shown) <= _VALUES_SHOWN:
        return "; ".join(shown)
    rest = sum(len(names) for names in list(groups.values())[_VALUES_SHOWN:])
    return f"{'; '.join(shown[:_VALUES_SHOWN])}; others on {rest:,} more"


def _release(version: str | None) -> str:
    return (version or "").partition("+")[0]


def _install(version: str, package: str, names: Sequence[str]) -> str:
    wanted = f"{package}=={version}" if version else package
    return f"python -m pip install {shlex.quote(wanted)}  # on {name_several(names)}"


def _copy(first: NodeDescription, names: Sequence[str], folder: str) -> str:
    if first.record.system == "win32":
        return f"copy {folder} from {first.name} to {name_several(names)}"
    path = folder.rstrip("/") + "/"
    # By content (-c): rsync would skip copies with the same length and time.
    lines = [
        f"rsync -ac {shlex.quote(path)} {shlex.quote(f'{name}:{path}')}"
        for name in names[:_LINES_SHOWN]
    ]
    lines[0] += f"  # on {first.name}"
    if len(names) > _LINES_SHOWN:
        lines.append(f"# and the same for {len(names) - _LINES_SHOWN:,} others")
    return "\n".join(lines)
