"""Find the differences between the hosts of a run before anything starts.

The first host is the reference. There is one finding for each kind of difference, however many hosts
have it.
"""

from collections.abc import Callable, Sequence

from torchmuster import __version__
from torchmuster.errors import ExitCode
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.fingerprint import LEAST_TORCH, torch_too_old
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.units import name_several


def compare_all_nodes(hosts: Sequence[ConnectedHost], spec: JobSpec) -> list[Finding]:
    """Return the differences between the hosts and, of those that are prepared, between the code they would run."""
    return [
        *_difference(
            hosts,
            lambda host: _record(host).system,
            name="mixed-operating-systems",
            what="operating systems",
            why="gloo cannot connect ranks on different systems, and NCCL runs on Linux only",
            fix="run all hosts on Linux (on Windows, inside WSL2)",
        ),
        *_difference(
            hosts,
            lambda host: _record(host).torchmuster,
            name="torchmuster-version",
            what="torchmuster versions",
            why="node agents of another version may misunderstand the launcher",
            fix=f"python -m pip install torchmuster=={__version__}  # on the other hosts",
        ),
        *_difference(
            hosts,
            lambda host: ".".join(_record(host).python.split(".")[:2]),
            name="python-version",
            what="Python versions",
            why="objects pickled by one rank may not unpickle on a rank with another Python version",
            status=Status.WARNING,
        ),
        *_torch(hosts),
        *_code(hosts, spec),
    ]


def other_protocol(name: str, hello: protocol.Hello) -> protocol.Trouble:
    """Return the error for a host whose torchmuster has another protocol version."""
    return protocol.Trouble(
        name="other-protocol",
        what=f"torchmuster on {name} uses protocol {hello.protocol}, this host uses {protocol.PROTOCOL}",
        why=f"{name} has version {hello.record.torchmuster}, this host has {__version__}",
        fix=f"python -m pip install torchmuster=={__version__}  # on {name}",
        exit_code=ExitCode.IMPOSSIBLE,
    )


def _record(host: ConnectedHost) -> protocol.NodeRecord:
    assert host.record is not None, f"{host.name} has not joined"
    return host.record


def _difference(
    hosts: Sequence[ConnectedHost],
    value: Callable[[ConnectedHost], str],
    *,
    name: str,
    what: str,
    why: str,
    fix: str = "",
    status: Status = Status.FAILURE,
) -> list[Finding]:
    """Return a finding if a value differs: ``torch versions differ: 2.13.0 on a and 2.14.0 on b``."""
    groups: dict[str, list[str]] = {}
    for host in hosts:
        groups.setdefault(value(host), []).append(host.name)
    if len(groups) < 2:
        return []
    shares = [f"{text} on {name_several(names)}" for text, names in groups.items()]
    what = f"{what} differ: {name_several(shares)}"
    return [Finding(name=name, status=status, what=what, why=why, fix=fix)]


def _torch(hosts: Sequence[ConnectedHost]) -> list[Finding]:
    release = {host.name: (_record(host).torch or "none").partition("+")[0] for host in hosts}
    usable: list[ConnectedHost] = []
    unusable: list[str] = []
    for host in hosts:
        version = release[host.name]
        if version == "none" or torch_too_old(version):
            unusable.append(host.name)
        else:
            usable.append(host)
    wanted = f"torch=={release[usable[0].name]}" if usable else f"'torch>={LEAST_TORCH}'"
    findings = _difference(
        usable,
        lambda host: release[host.name],
        name="torch-version",
        what="torch versions",
        why="different versions may connect and then hang, or compute different results",
        fix=f"python -m pip install {wanted}  # on the other hosts",
    )
    if unusable:
        findings.append(
            Finding(
                name="torch-missing",
                status=Status.FAILURE,
                what=f"torch {LEAST_TORCH} or newer is not installed on {name_several(unusable)}",
                why=f"the Python environment that runs torchmuster there has: {release[unusable[0]]}",
                fix=f"python -m pip install {wanted}  # on {name_several(unusable)}",
            )
        )
    return findings


def _code(hosts: Sequence[ConnectedHost], spec: JobSpec) -> list[Finding]:
    codes = {}
    for host in hosts:
        if host.prepared is not None and host.prepared.fingerprint is not None:
            codes[host.name] = host.prepared.fingerprint
    missing = [name for name, code in codes.items() if not code.script_sha256]
    present = [name for name in codes if name not in missing]
    if spec.program or (spec.module and not present):
        return []  # found by the system, or by Python, whose own error is clearer
    script = f"module {spec.command[0]}" if spec.module else spec.command[0]
    findings = []
    if missing:
        findings.append(
            Finding(
                name="script-missing",
                status=Status.FAILURE,
                what=f"{script} does not exist on {name_several(missing)}",
                why=f"every host runs its own copy in {spec.folder}",
                fix="copy the folder there, or run muster in the folder that contains it",
            )
        )
    differing = [name for name in present if codes[name] != codes[present[0]]]
    if differing:
        findings.append(
            Finding(
                name="code-differs",
                status=Status.FAILURE,
                what=f"{script} or the code next to it on {name_several(differing)} differs from the copy on {present[0]}",
                why="ranks that run different code can hang",
                fix=f"copy {spec.folder} from {present[0]} to {name_several(differing)}, for example with rsync -ac",
            )
        )
    return findings
