"""Ports: whether the rendezvous ports are free, and which process holds them."""

from collections.abc import Iterator, Mapping

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.listening import holder_of

# If one of these is set, a scheduler or torchrun has set up this environment for a current run.
_MARKS = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "KUBERNETES_SERVICE_HOST",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
)

_TORCHS_PORT = 29500


def run_is_active(environment: Mapping[str, str]) -> bool:
    """Return whether a scheduler or torchrun has set up this environment."""
    return any(item in environment for item in _MARKS)


def check_ports(surroundings: Surroundings) -> Iterator[Finding]:
    """Check ports 29400, 29500 and MASTER_PORT."""
    text = surroundings.environment.get("MASTER_PORT", "")
    chosen = int(text) if text.isdecimal() and 0 < int(text) < 65536 else None
    of_a_run = chosen if run_is_active(surroundings.environment) else None
    findings, free = [], []
    for port in dict.fromkeys((USUAL_PORT, _TORCHS_PORT, chosen)):
        if port is None or port == of_a_run:
            continue
        holder = holder_of(port)
        if holder is None:
            free.append(str(port))
        else:
            findings.append(_taken(port, holder, surroundings, asked_for=port == chosen))
    seen = f"{', '.join(free)} {'is' if len(free) == 1 else 'are'} free"
    if of_a_run is not None:
        seen = f"{of_a_run} belongs to the current run; {seen}"
    yield from findings or [Finding(name="ports", status=Status.OK, what=seen)]


def _taken(port: int, holder: str, surroundings: Surroundings, *, asked_for: bool) -> Finding:
    if asked_for and _meets_here(surroundings):
        return finding("master-port-taken", port=port, holder=holder)
    uses = (
        "Muster uses the next free port; torchrun with this rendezvous port hangs"
        if port == USUAL_PORT
        else "torchrun and scripts that use it by default fail with “address already in use”"
    )
    return finding("port-taken", port=port, holder=holder, uses=uses, next_port=port + 1)


def _meets_here(surroundings: Surroundings) -> bool:
    address = surroundings.environment.get("MASTER_ADDR", "")
    # Names are not resolved: that may take seconds.
    return not address or network.is_local(address, look_up=lambda _: ())


CHECKS = (Check(name="ports", asks="Are the rendezvous ports free?", run=check_ports),)
