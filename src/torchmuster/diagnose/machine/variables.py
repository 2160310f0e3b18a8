"""Environment variables that make runs fail, hang or slow down."""

from collections.abc import Iterator

from torchmuster.devices.model import LinkKind
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.visibility import STAGES, visible
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import infiniband
from torchmuster.diagnose.machine.ports import run_is_active
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.launch.network import interfaces
from torchmuster.redaction import redact_text

_ON = ("1", "true", "yes", "on", "y")
_RUNS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# Switches that make every run slower or hang: the values that matter, and their effect.
HARMS = (
    (
        "CUDA_LAUNCH_BLOCKING",
        _ON,
        "each kernel waits for the previous one: useful for debugging, but several times slower",
    ),
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _ON,
        "each tensor allocates its memory from the driver, which is many times slower",
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        ("detail",),
        "each collective is first compared across all ranks: useful for debugging, but slow",
    ),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        _ON,
        "each collective blocks the CPU until it completes, so nothing overlaps with it",
    ),
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ("0",),
        "a rank whose peer has died waits forever instead of exiting",
    ),
    (
        "NCCL_P2P_DISABLE",
        _ON,
        "the GPUs here have NVLink, but data goes through host memory instead",
    ),
    (
        "NCCL_IB_DISABLE",
        _ON,
        "this host has InfiniBand, but NCCL uses plain TCP instead",
    ),
)


def _has_unused_path(variable: str, surroundings: Surroundings) -> bool:
    """Return whether the host has what the variable switches off."""
    if variable == "NCCL_P2P_DISABLE":
        return any(link.kind is LinkKind.NVLINK for link in surroundings.look().links)
    if variable == "NCCL_IB_DISABLE":
        ports = infiniband.read_ports(surroundings)
        return any(port.is_active and port.link_layer == "InfiniBand" for port in ports)
    return True


def _harmful(surroundings: Surroundings) -> Iterator[Finding]:
    found = []
    for variable, harmful_values, why in HARMS:
        value = surroundings.environment.get(variable, "")
        if value.lower() in harmful_values and _has_unused_path(variable, surroundings):
            found.append(finding("harmful-variable", variable=variable, value=value, why=why))
    fine = Finding(name="variables", status=Status.OK, what="no harmful variable set")
    yield from found or [fine]


# ---- which GPUs, which interfaces


def _devices(surroundings: Surroundings) -> Iterator[Finding]:
    node, environment = surroundings.look(), surroundings.environment
    shown = visible(node.accelerators, environment)
    gpus = [
        device
        for device in node.accelerators
        if device.mig_index is not None or not device.mig_enabled
    ]
    found = list(shown.findings)
    if gpus and not shown.devices and not found:
        hiding = next(iter(shown.hidden_by.values()), "the environment")
        variable, _, value = hiding.partition("=")
        found.append(
            finding(
                "gpus-hidden",
                status=Status.WARNING if value == '""' else Status.NOTE,
                hiding=hiding,
                variable=variable,
            )
        )
    yield from found
    if all(finding.status is Status.NOTE for finding in found):
        names = [name for stages in STAGES.values() for stage in stages for name in stage]
        used = [name for name in dict.fromkeys(names) if name in environment]
        words = f"{', '.join(used)} set" if used and gpus else "no GPU is hidden"
        yield Finding(name="visible-devices", status=Status.OK, what=words)


def _interfaces(surroundings: Surroundings) -> Iterator[Finding]:
    """Yield a failure for an interface that gloo cannot use."""
    findings = interfaces.socket_findings(surroundings.environment, interfaces.read_interfaces())
    yield from findings
    if not findings:
        value = surroundings.environment.get(interfaces.GLOO_VARIABLE)
        seen = f"interface {value} chosen" if value else "no interface chosen"
        yield Finding(name="chosen-interfaces", status=Status.OK, what=seen)


# ---- threads


def _threads(surroundings: Surroundings) -> Iterator[Finding]:
    cores = usable_cores(surroundings.path("/proc"), surroundings.path("/sys")).value
    found = []
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = surroundings.environment.get(variable, "")
        first = value.partition(",")[0].strip()  # one number for each level of nesting
        threads = int(first) if first.isdecimal() else 0
        fix = (
            f"unset {variable}  # or: export {variable}={cores}, divided by the ranks on this host"
        )
        if value and (not threads or threads > cores):
            found.append(
                Finding(
                    name="too-many-threads" if threads else "not-a-number-of-threads",
                    status=Status.WARNING,
                    what=f"{variable}={value} is more than the {cores} usable cores"
                    if threads
                    else f"{variable}={value} is not a number of threads",
                    why="the threads of each rank compete for the cores, and each step waits for "
                    "the slowest"
                    if threads
                    else "it is ignored, and each rank starts a thread for every core",
                    fix=fix,
                )
            )
    yield from found
    if all(finding.status is Status.NOTE for finding in found):
        value = surroundings.environment.get("OMP_NUM_THREADS", "")
        words = f"OMP_NUM_THREADS={value}" if value else "not set; torch chooses"
        yield Finding(name="threads", status=Status.OK, what=words)


# ---- left over from another run


def _left_over(surroundings: Surroundings) -> Iterator[Finding]:
    environment = surroundings.environment
    settings = sorted(name for name in environment if name.startswith("PET_"))
    left = [name for name in (*_RUNS_OWN, *settings) if name in environment]
    if not left or run_is_active(environment):
        words = "set by the current run" if left else "none from another run"
        yield Finding(name="left-over-variables", status=Status.OK, what=words)
        return
    yield finding(
        "left-over-variables",
        left=", ".join(left),
        why_detail="; PET_ variables override the flags of torchrun" if settings else "",
        names=" ".join(left),
        evidence=", ".join(f"{name}={redact_text(environment[name])}" for name in left),
    )


CHECKS = (
    Check(
        name="harmful-variables",
        asks="Does an environment variable slow runs down, or make them hang instead of fail?",
        run=_harmful,
    ),
    Check(
        name="visible-devices",
        asks="Do CUDA_VISIBLE_DEVICES and similar variables name existing GPUs, each once?",
        run=_devices,
    ),
    Check(
        name="chosen-interfaces",
        asks="Do GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name interfaces that exist and are up?",
        run=_interfaces,
    ),
    Check(
        name="threads",
        asks="Do OMP_NUM_THREADS and MKL_NUM_THREADS fit the number of cores of this host?",
        run=_threads,
    ),
    Check(
        name="left-over-variables",
        asks="Is this shell free of RANK, MASTER_ADDR and the like from another run?",
        run=_left_over,
    ),
)
