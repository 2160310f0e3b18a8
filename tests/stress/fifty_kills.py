"""Kills by chance: anybody's, at any time; each is to end (or restart) the run everywhere in time."""

import itertools
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hosts.killing import SCRIPTS, Kill, Run
from hosts.lab import Lab
from patience import GIVE_UP_S

VICTIMS = (
    "rank",
    "store",
    "node agent",
    "supervisor",
    "ssh session",
    "launcher",
    "host",
    "link",
)
PHASES = ("starting", "running", "ending")
# The launcher reaches its own machine without ssh.
_ONLY_ON = {"launcher": "node1", "store": "node1", "ssh session": "node2"}
_RESTARTABLE = ("rank", "store", "node agent", "supervisor", "ssh session")
_CAUSES = {
    "rank": r"rank {rank} on {host} failed: killed \(SIGKILL\)",
    "store": r"{host} failed: the ranks' store exited with code -9",
    "node agent": r"{host} was lost: its node agent was killed or exited without an error message",
    "supervisor": r"{host} was lost: its node agent was killed or exited without an error message",
    "ssh session": r"{host} was lost: Connection to \S+ closed by remote host",
    "host": r"{host} was lost: no heartbeat for \d\d s: the link is down or the host is gone",
    "link": r"{host} was lost: no heartbeat for \d\d s: the link is down or the host is gone",
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Who is killed, where and when, and whether the run is to be started again then."""

    victim: str
    host: str
    phase: str
    restarts: bool = False

    @property
    def kill(self) -> Kill:
        rank = {"node1": 0, "node2": 1}[self.host]
        victim = f"rank {rank}" if self.victim == "rank" else self.victim
        return Kill(victim=victim, host=self.host)

    @property
    def says(self) -> str | None:
        """What the launcher must say; None where it is gone, or has nothing to say."""
        if self.victim == "launcher" or (self.victim, self.host) == ("host", "node1"):
            return None
        # The link of the launcher's own host is cut: it is the other one that it does not hear.
        host = "node2" if self.victim == "link" else self.host
        return _CAUSES[self.victim].format(rank=int(host == "node2"), host=re.escape(host))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How long it took until the run was over or had started again, and what was said."""

    event: Event
    seconds: float
    said: str

    def __str__(self) -> str:
        end = "started again" if self.event.restarts else "gone"
        where = f"{self.event.victim} on {self.event.host}"
        return f"{where:<22} {self.event.phase:<9} {end:<13} {self.seconds:5.1f} s  {self.said}"


def events(count: int, chance: random.Random) -> Iterator[Event]:
    """Return so many events; every victim is hit in every phase before one comes again."""
    kinds = list(itertools.product(VICTIMS, PHASES))
    rounds = itertools.count()
    while True:
        chance.shuffle(kinds)
        restarting = bool(next(rounds) % 2)
        for victim, phase in kinds:
            host = _ONLY_ON.get(victim) or chance.choice(("node1", "node2"))
            if phase == "ending" and victim == "rank":
                host = "node2"  # the other one has ended already
            restarts = restarting and victim in _RESTARTABLE and phase != "ending"
            yield Event(victim=victim, host=host, phase=phase, restarts=restarts)
            count -= 1
            if not count:
                return


def happen(event: Event, folder: Path) -> Outcome:
    """Launch a run on two hosts, let the event happen to it, and see that all is as it must be."""
    options = ["--max-restarts", "1"] if event.restarts else []
    with Lab(2) as lab:
        run = Run.launch(lab, folder, SCRIPTS[event.phase], options=options)
        run.wait_for_phase(event.phase)
        killed_s = event.kill.strike(run)
        if event.restarts:
            seconds = _seconds_until_restarted(run, killed_s)
            run.process.interrupt()
            run.wait_until_clean()
        else:
            run.wait_until_clean()
            seconds = time.monotonic() - killed_s
        code = run.end()
        said = run.transcript.text("err")
        headlines = re.findall(r"(?:failure  |muster: )(.*(?:failed|was lost).*)", said)
        if event.says is None:
            assert code == -9
            return Outcome(event=event, seconds=seconds, said="(nobody is left to say it)")
        assert headlines, said
        assert re.search(event.says, headlines[0]), said
        assert code == (130 if event.restarts else 1), said
        return Outcome(event=event, seconds=seconds, said=headlines[0])


def _seconds_until_restarted(run: Run, since_s: float) -> float:
    run.transcript.wait_for("; restarting")
    while run.transcript.text("err").count("ranks started") < 2:
        if time.monotonic() - since_s > GIVE_UP_S:
            raise AssertionError(f"not started again in time\n{run.transcript.text()}")
        time.sleep(0.02)
    return time.monotonic() - since_s
