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
from torchmuster.units import name_several

_VALUES_SHOWN = 4
_SYSTEMS = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}


@dataclass(frozen=True, kw_only=True)
class NodeDescription:
    """A host of the run: its display name and what it reported."""

    name: str
    record: protocol.NodeRecord
    fingerprint: protocol.Fingerprint | None = None


def compare_all_nodes(nodes: Sequence[NodeDescription], spec: JobSpec) -> list[Finding]:
    """Return the differences between the hosts and between the code they would run."""
    prepared = [node for node in nodes if node.fingerprint is not None]
    return [*_environments(nodes), *_torch(nodes), *_code(prepared, spec)]


def other_protocol(name: str, hello: protocol.Hello) -> protocol.Trouble:
    """Return the error for a host whose torchmuster has another protocol version."""
    return protocol.Trouble(
        name="other-protocol",
        what=f"torchmuster on {name} uses protocol {hello.protocol}, this host uses {protocol.PROTOCOL}",
        why=f"{name} has version {hello.record.torchmuster}, this host has {__version__}",
        fix=_install(__version__, "torchmuster", [name]),
        exit_code=ExitCode.IMPOSSIBLE,
    )


def _environments(nodes: Sequence[NodeDescription]) -> Iterator[Finding]:
    systems = _groups(nodes, lambda node: _SYSTEMS.get(node.record.system, node.record.system))
    if len(systems) > 1:
        yield Finding(
            name="mixed-operating-systems",
            status=Status.FAILURE,
            what=f"the hosts have different operating systems: {_shares(systems)}",
            why="gloo cannot connect ranks on different systems, and NCCL runs on Linux only",
            fix="run all hosts on Linux (on Windows, inside WSL2)\n"
            f"or use only hosts with the same system: {name_several(max(systems.values(), key=len))}",
        )
    versions = _groups(nodes, lambda node: node.record.torchmuster)
    if len(versions) > 1:
        yield Finding(
            name="torchmuster-version",
            status=Status.FAILURE,
            what=f"torchmuster versions differ: {_shares(versions)}",
            why="node agents of another version may misunderstand the launcher",
            fix=_install(next(iter(versions)), "torchmuster", _all_but_first(versions)),
        )
    pythons = _groups(nodes, lambda node: ".".join(node.record.python.split(".")[:2]))
    if len(pythons) > 1:
        yield Finding(
            name="python-version",
            status=Status.WARNING,
            what=f"Python versions differ: {_shares(pythons)}",
            why="objects pickled by one rank may not unpickle on a rank with another Python version",
        )


def _torch(nodes: Sequence[NodeDescription]) -> Iterator[Finding]:
    builds = _groups(nodes, lambda node: node.record.torch or "none")
    releases = _groups(nodes, lambda node: (node.record.torch or "none").partition("+")[0])
    unusable: list[str] = []
    usable: dict[str, list[str]] = {}
    for release, names in releases.items():
        if release == "none" or torch_too_old(release):
            unusable += names
        else:
            usable[release] = names
    version = next(iter(usable), "")
    if unusable:
        yield Finding(
            name="torch-missing",
            status=Status.FAILURE,
            what=f"torch {LEAST_TORCH} or newer is not installed on {name_several(unusable)}",
            why=f"the Python environments that run torchmuster have: {_shares(releases)}",
            fix=_install(version, "torch", unusable),
        )
    if len(usable) > 1:
        yield Finding(
            name="torch-version",
            status=Status.FAILURE,
            what=f"torch versions differ: {_shares(usable)}",
            why="different versions may connect and then hang, or compute different results",
            fix=_install(version, "torch", _all_but_first(usable)),
        )
    elif len(builds) > len(releases):
        yield Finding(
            name="torch-build",
            status=Status.WARNING,
            what=f"torch builds differ: {_shares(builds)}",
            why="the same release, built for different hardware; a +cpu build does not use GPUs",
        )


def _code(nodes: Sequence[NodeDescription], spec: JobSpec) -> Iterator[Finding]:
    script = f"module {spec.command[0]}" if spec.module else spec.command[0]
    path = PureWindowsPath if "\\" in spec.folder else PurePosixPath
    folder = str(code_folder(path(spec.folder, spec.command[0]), spec.module, spec.folder))
    missing = [node.name for node in nodes if not _hashes(node)[0]]
    present = [node for node in nodes if _hashes(node)[0]]
    # If no host has the module, Python's own error is clearer.
    if missing and (present or not spec.module):
        fix = "check the path, or run muster in the folder that contains it"
        if _hashes(nodes[0])[0]:
            fix = _copy(nodes[0], missing, folder)
        yield Finding(
            name="script-missing",
            status=Status.FAILURE,
            what=f"{script} does not exist on {name_several(missing)}",
            why=f"every host runs its own copy in {folder}",
            fix=fix,
        )
    if not present:
        return
    first = present[0]
    of_script, of_folder = _hashes(first)
    differing = []
    for node in present:
        own_script, own_folder = _hashes(node)
        is_compared = own_folder and of_folder  # else one of them is too large to compare
        if own_script != of_script or (is_compared and own_folder != of_folder):
            differing.append(node.name)
    if differing:
        yield Finding(
            name="code-differs",
            status=Status.FAILURE,
            what=f"{script} or the code next to it on {name_several(differing)} differs from the copy on {first.name}",
            why=f"Python files in {folder} differ; ranks that run different code can hang",
            fix=_copy(first, differing, folder),
        )


def _hashes(node: NodeDescription) -> tuple[str, str]:
    """Return the hashes of the script and of the code in its folder, "" if unknown."""
    assert node.fingerprint is not None
    return node.fingerprint.script_sha256, node.fingerprint.code_sha256


def _groups(
    nodes: Sequence[NodeDescription], value: Callable[[NodeDescription], str]
) -> dict[str, list[str]]:
    """Return the host names by value, in the order in which the values appear."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        groups.setdefault(value(node), []).append(node.name)
    return groups


def _all_but_first(groups: Mapping[str, Sequence[str]]) -> list[str]:
    _, *rest = groups.values()
    return [name for names in rest for name in names]


def _shares(groups: Mapping[str, Sequence[str]]) -> str:
    shown = [f"{value} on {name_several(names)}" for value, names in groups.items()]
    if len(shown) > _VALUES_SHOWN:
        shown[_VALUES_SHOWN:] = [f"{len(shown) - _VALUES_SHOWN:,} more"]
    return "; ".join(shown)


def _install(version: str, package: str, names: Sequence[str]) -> str:
    wanted = f"{package}=={version}" if version else f"torch>={LEAST_TORCH}"
    return f"python -m pip install {shlex.quote(wanted)}  # on {name_several(names)}"


def _copy(first: NodeDescription, names: Sequence[str], folder: str) -> str:
    if "\\" in folder:  # of Windows
        return f"copy {folder} from {first.name} to {name_several(names)}"
    path = shlex.quote(folder.rstrip("/") + "/")
    # By content (-c): rsync would skip copies with the same length and time.
    command = f"rsync -ac {path} {shlex.quote(names[0])}:{path}  # on {first.name}"
    more = f"; the same for {name_several(names[1:])}" if len(names) > 1 else ""
    return command + more
