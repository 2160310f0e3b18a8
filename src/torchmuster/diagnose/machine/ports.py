"""Ports: whether the rendezvous ports are free, and which process holds them."""

from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network.listening import holder_of


def check_ports(surroundings: Surroundings) -> Iterator[Finding]:
    """Check port 29400 and MASTER_PORT, unless a run has set up this environment."""
    if "RANK" in surroundings.environment:
        return
    holder = holder_of(USUAL_PORT)
    if holder is not None:
        yield finding("port-taken", port=USUAL_PORT, holder=holder)
    chosen = surroundings.environment.get("MASTER_PORT", "")
    holder = holder_of(int(chosen)) if chosen.isdecimal() else None
    if holder is not None:
        yield finding("master-port-taken", port=chosen, holder=holder)


CHECKS = (Check(name="ports", asks="Are the rendezvous ports free?", run=check_ports),)
