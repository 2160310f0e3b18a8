"""Variables of the environment that make runs fail, hang or crawl."""

from collections.abc import Iterator

from torchmuster.devices.model import Kind
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.visibility import STAGES, visible
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import harmful_variables
from torchmuster.diagnose.machine.under_way import is_under_way
from torchmuster.finding import Finding, Status
from torchmuster.launch.network import interfaces
from torchmuster.redaction import redact_text

# ---- which GPUs, which interfaces


def _devices(surroundings: Surroundings) -> Iterator[Finding]:
    node, environment = surroundings.look(), surroundings.environment
    shown = visible(node.accelerators, environment)
    gpus = [one for one in node.accelerators if one.mig_index is not None or not one.mig_enabled]
    found = list(shown.findings)
    if gpus and not shown.devices and not found:
        hiding = next(iter(shown.hidden_by.values()), "the environment")
        variable, _, value = hiding.partition("=")
        found.append(
            Finding(
                name="gpus-hidden",
                status=Status.WARNING if value == '""' else Status.NOTE,
                what=f"{hiding} hides every GPU of this machine",
                why="programs that are started here compute on the CPU or fail",
                fix=f"unset {variable}",
            )
        )
    yield from found
    if all(one.status is Status.NOTE for one in found):
        names = [name for stages in STAGES.values() for stage in stages for name in stage]
        used = [name for name in dict.fromkeys(names) if name in environment]
        words = f"{', '.join(used)} set" if used and gpus else "no GPU is hidden"
        yield Finding(name="visible-devices", status=Status.OK, what=words)


def _interfaces(surroundings: Surroundings) -> Iterator[Finding]:
    """Yield what cannot work at all as a failure, what works on this machine alone as a warning."""
    environment, known = surroundings.environment, interfaces.read()
    gpus = surroundings.look().main_kind is Kind.CUDA
    failing = interfaces.socket_findings(environment, known, alone=True, gpus=gpus)
    among_others = interfaces.socket_findings(environment, known, alone=False, gpus=gpus)
    told = {one.what for one in failing}
    yield from failing
    for one in among_others:
        if one.what not in told:
            what = one.what.replace("cannot work on this machine", "works on this machine alone")
            yield Finding(
                name=one.name,
                status=Status.WARNING,
                what=what,
                why=one.why,
                fix=one.fix,
                evidence=one.evidence,
            )
    if not among_others:
        chosen = [
            environment.get(one) for one in (interfaces.GLOO_VARIABLE, interfaces.NCCL_VARIABLE)
        ]
        words = (
            f"interface {chosen[0] or chosen[1]} chosen" if any(chosen) else "no interface chosen"
        )
        yield Finding(name="chosen-interfaces", status=Status.OK, what=words)


# ---- threads

_CORES_WORTH_USING = 4


def _threads(surroundings: Surroundings) -> Iterator[Finding]:
    cores = usable_cores(surroundings.path("/proc"), surroundings.path("/sys")).value
    found = []
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = surroundings.environment.get(variable, "")
        first = value.partition(",")[0].strip()  # one number for each level of nesting
        threads = int(first) if first.isdecimal() else 0
        fix = f"unset {variable}  # or: export {variable}={cores}, divided by the ranks here"
        if value and (not threads or threads > cores):
            found.append(
                Finding(
                    name="too-many-threads" if threads else "not-a-number-of-threads",
                    status=Status.WARNING,
                    what=f"{variable}={value} is more than the {cores} cores that may be used here"
                    if threads
                    else f"{variable}={value} is not a number of threads",
                    why="the threads of each rank take the cores from each other, and all wait for "
                    "the last"
                    if threads
                    else "it is ignored, and each rank starts a thread for every core",
                    fix=fix,
                )
            )
        elif threads == 1 and cores >= _CORES_WORTH_USING:
            found.append(
                Finding(
                    name="one-thread",
                    status=Status.NOTE,
                    what=f"{variable}=1 keeps each rank on one of the {cores} cores here",
                    why="what ranks do on the CPU, such as preparing data, is slower than it could be",
                    fix=fix,
                )
            )
    yield from found
    if all(one.status is Status.NOTE for one in found):
        value = surroundings.environment.get("OMP_NUM_THREADS", "")
        words = f"OMP_NUM_THREADS={value}" if value else "threads left to torch"
        yield Finding(name="threads", status=Status.OK, what=words)


# ---- left over from another run

_RUNS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _left_over(surroundings: Surroundings) -> Iterator[Finding]:
    environment = surroundings.environment
    settings = sorted(one for one in environment if one.startswith("PET_"))
    left = [one for one in (*_RUNS_OWN, *settings) if one in environment]
    if not left or is_under_way(environment):
        words = "those of a run under way" if left else "none of another run"
        yield Finding(name="left-over-variables", status=Status.OK, what=words)
        return
    yield Finding(
        name="left-over-variables",
        status=Status.WARNING,
        what=f"this shell has variables of a run: {', '.join(left)}",
        why="a script that is started here without a launcher takes itself for a rank of that run and "
        "waits for the others" + ("; PET_ ones overrule the flags of torchrun" if settings else ""),
        fix=f"unset {' '.join(left)}",
        evidence=", ".join(f"{one}={redact_text(environment[one])}" for one in left),
    )


CHECKS = (
    *harmful_variables.CHECKS,
    Check(
        name="visible-devices",
        asks="Do CUDA_VISIBLE_DEVICES and its kin name GPUs that exist, each once?",
        run=_devices,
    ),
    Check(
        name="chosen-interfaces",
        asks="Do GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name interfaces that are here and up?",
        run=_interfaces,
    ),
    Check(
        name="threads",
        asks="Are OMP_NUM_THREADS and MKL_NUM_THREADS within the cores of this machine?",
        run=_threads,
    ),
    Check(
        name="left-over-variables",
        asks="Is this shell free of RANK, MASTER_ADDR and the like from another run?",
        run=_left_over,
    ),
)
