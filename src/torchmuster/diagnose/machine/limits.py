"""Limits of this process: open files and locked memory."""

from collections.abc import Iterator

from torchmuster.devices.readers import sysfs
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.units import GiB, format_bytes

# The usual default; DataLoader workers need an open file per shared tensor.
_USUAL_FILES = 1024
_WANTED_FILES = "65536"
# RDMA pins its send buffers; NCCL alone needs more than this on a node with 8 GPUs.
_LOCKED_BYTES = GiB


def check_limits(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the limits of this process, which its children inherit."""
    import resource  # Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft <= _USUAL_FILES:  # negative: no limit
        yield finding(
            "open-files-low",
            status=Status.WARNING if soft < _USUAL_FILES else Status.NOTE,
            soft=soft,
            hard=hard,
            fix=_raising("n", "nofile", _WANTED_FILES, "LimitNOFILE"),
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = sysfs.read_names(surroundings.path("/dev/infiniband"))
    has_rdma = any(name.startswith("uverbs") for name in devices)
    if has_rdma and 0 <= soft < _LOCKED_BYTES:
        yield finding(
            "locked-memory-low",
            soft=format_bytes(soft),
            fix=_raising("l", "memlock", "unlimited", "LimitMEMLOCK"),
        )


def _raising(option: str, name: str, value: str, systemd: str) -> str:
    """Return how to raise a limit: in this shell, permanently, in Docker and for a service."""
    return (
        f"ulimit -{option} {value}  # in this shell, up to the hard limit\n"
        f"echo '* - {name} {value}' | sudo tee /etc/security/limits.d/90-{name}.conf  # "
        "permanently, after the next login\n"
        f"docker run --ulimit {name}={value.replace('unlimited', '-1')} …\n"
        f"{systemd}={value.replace('unlimited', 'infinity')}  # in the [Service] section of a systemd unit, "
        "e.g. slurmd's"
    )


CHECKS = (
    Check(
        name="limits",
        asks="Are the process limits high enough for ranks and their workers?",
        run=check_limits,
        systems=("linux",),
    ),
)
