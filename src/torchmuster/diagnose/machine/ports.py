"""Ports: whether those at which ranks meet are free, and who holds them."""

from collections.abc import Iterator, Mapping

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.listening import holder_of

# Where one of these is set, a scheduler or torchrun has set the others for a run that is under way.
_MARKS = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "KUBERNETES_SERVICE_HOST",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
)


def run_is_active(environment: Mapping[str, str]) -> bool:
    """Say whether a scheduler or torchrun has prepared this environment."""
    return any(one in environment for one in _MARKS)


_TORCHS_PORT = 29500


def check_ports(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at 29400, 29500 and the port that MASTER_PORT names."""
    asked = surroundings.environment.get("MASTER_PORT", "")
    chosen = int(asked) if asked.isdecimal() and 0 < int(asked) < 65536 else None
    of_a_run = chosen if run_is_active(surroundings.environment) else None
    findings, free = [], []
    for port in dict.fromkeys((USUAL_PORT, _TORCHS_PORT, chosen)):
        if port is None or port == of_a_run:
            continue
        holder = holder_of(port)
        if holder is None:
            free.append(str(port))
        else:
            findings.append(_ports_taken(port, holder, surroundings, asked_for=port == chosen))
    seen = f"{', '.join(free)} {'is' if len(free) == 1 else 'are'} free"
    if of_a_run is not None:
        seen = f"{of_a_run} is that of the run under way; {seen}"
    yield from findings or [Finding(name="ports", status=Status.OK, what=seen)]


def _ports_taken(port: int, holder: str, surroundings: Surroundings, *, asked_for: bool) -> Finding:
    if asked_for and _meets_here(surroundings):
        return Finding(
            name="master-port-taken",
            status=Status.WARNING,
            what=f"port {port}, which MASTER_PORT names, is taken",
            why=f"{holder} holds it; rank 0 ends with “address already in use” and the others hang",
            fix="unset MASTER_PORT  # muster and torchrun then choose a free one",
            evidence=f"MASTER_PORT={port}",
        )
    uses = (
        "muster takes the next free one; a torchrun that is told to meet here hangs"
        if port == USUAL_PORT
        else "torchrun and scripts that use it by default end with “address already in use”"
    )
    return Finding(
        name="port-taken",
        status=Status.NOTE,
        what=f"port {port} is taken by {holder}",
        why=uses,
        fix=f"torchrun --master-port {port + 1} …  # or --rdzv-endpoint with another port",
    )


def _meets_here(surroundings: Surroundings) -> bool:
    address = surroundings.environment.get("MASTER_ADDR", "")
    # A name is not looked up: that may take seconds.
    return not address or network.is_local(address, look_up=lambda _: ())


CHECKS = (Check(name="ports", asks="Are the ports at which ranks meet free?", run=check_ports),)
