"""Environment variables that make runs fail, hang or slow down."""

from collections.abc import Iterator

from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.visibility import visible
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

_ON = ("1", "true", "yes", "on", "y")
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
)
# These may be right, where the direct path is broken.
_SLOWER = {
    "NCCL_P2P_DISABLE": "data between GPUs goes through host memory, also where they have NVLink",
    "NCCL_IB_DISABLE": "NCCL uses plain TCP, also where there is InfiniBand",
}


def _harmful(surroundings: Surroundings) -> Iterator[Finding]:
    for variable, harmful_values, why in HARMS:
        value = surroundings.environment.get(variable, "")
        if value.lower() in harmful_values:
            yield finding("harmful-variable", variable=variable, value=value, why=why)
    for variable, why in _SLOWER.items():
        value = surroundings.environment.get(variable, "")
        if value.lower() in _ON:
            yield finding(
                "harmful-variable", status=Status.NOTE, variable=variable, value=value, why=why
            )


def _devices(surroundings: Surroundings) -> Iterator[Finding]:
    node = surroundings.take_snapshot()
    shown = visible(node.accelerators, surroundings.environment)
    yield from shown.findings
    if shown.hidden_by and not shown.devices and not shown.findings:
        hiding = next(iter(shown.hidden_by.values()))
        variable, _, value = hiding.partition("=")
        yield finding(
            "gpus-hidden",
            status=Status.WARNING if value == '""' else Status.NOTE,
            hiding=hiding,
            variable=variable,
        )


def _threads(surroundings: Surroundings) -> Iterator[Finding]:
    cores = usable_cores(surroundings.path("/proc"), surroundings.path("/sys")).value
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = surroundings.environment.get(variable, "")
        first = value.partition(",")[0].strip()  # one number for each level of nesting
        threads = int(first) if first.isdecimal() else 0
        if value and not 0 < threads <= cores:
            yield finding("too-many-threads", variable=variable, value=value, cores=cores)


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
        name="threads",
        asks="Do OMP_NUM_THREADS and MKL_NUM_THREADS fit the number of cores of this host?",
        run=_threads,
    ),
)
