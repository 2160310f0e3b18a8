"""A training under ``muster train`` that is struck by kills until it ends by itself, and what it then must be."""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from patience import GIVE_UP_S
from ranks.launched import Launched, launched
from stress.kill_matrix.events import Kill, Layout, Plan
from stress.kill_matrix.moments import Moments
from torchmuster.checkpoints.store import open_store
from torchmuster.checkpoints.verify import verify_checkpoint
from torchmuster.finding import render
from torchmuster.runfolder import RunFolder

# On a busy machine a start takes several times as long as on a quiet one.
_COMES_WITHIN_S = _ENDS_WITHIN_S = GIVE_UP_S
_GRACE = "5s"  # ranks whose launcher is killed may be waiting for their own kill
_STEPS_FOR_A_KILL = 30
# How long a run may go on before it is struck: a start takes a few seconds, a step some milliseconds.
_RESTARTING_S = 2.0
_TRAINING_S = 0.6
_TRAINING = "stress.kill_matrix.struck_training"
_TESTS = Path(__file__).parents[2]
_MODULES = {
    "torchmuster.launch.node.supervisor": "supervisor",
    "torchmuster.launch.node": "node agent",
}


class Broken(AssertionError):
    """A run that did not survive as it must."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a training came to: the loss of every step, and the digest of its weights."""

    losses: Mapping[int, float]
    weights_sha256: str

    @classmethod
    def of(cls, run: RunFolder, steps: int) -> "Ended":
        """Read what a run has left; every step must be there once."""
        lines = (run.metrics / "steps.jsonl").read_text().splitlines()
        losses = [(record["step"], record["loss"]) for record in map(json.loads, lines)]
        found, wanted = [step for step, _ in losses], list(range(1, steps + 1))
        if found != wanted:
            twice = sorted({one for one in found if found.count(one) > 1})
            missing = sorted(set(wanted) - set(found))
            raise Broken(f"the steps in its metrics: twice {twice}, missing {missing}")
        weights = (run.checkpoints / "final" / "model.safetensors").read_bytes()
        return cls(losses=dict(losses), weights_sha256=hashlib.sha256(weights).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A kill that happened: what the newest checkpoint was then, and the time until the next step."""

    kill: Kill
    newest: str  # committed, unfinished, or none
    recovered_s: float | None  # None where the next kill came before

    def __str__(self) -> str:
        took = "-" if self.recovered_s is None else f"{self.recovered_s:.1f} s"
        return f"{self.kill!s:<28} newest checkpoint {self.newest:<10}  next step after {took}"


def steps_for(kills: int) -> int:
    """Return how many steps a training needs so that so many kills find it at work."""
    return 40 + _STEPS_FOR_A_KILL * kills


def settings_of(layout: Layout, steps: int) -> dict[str, str]:
    """Return the settings of the training, which the losses and weights depend on."""
    return {
        "model.build": f"{_TRAINING}:model",
        "data.dataset": f"{_TRAINING}:data",
        "distributed.strategy": layout.strategy,
        "train.steps": str(steps),
        "train.global_batch_size": "16",
        "train.learning_rate": "0.001",
        "train.schedule": "cosine",
        "train.warmup": "10",
        "train.clip_norm": "1",
        "train.log_every": "1",
        "checkpoint.every": "8",
        "checkpoint.keep": "3",
    }


def undisturbed(layout: Layout, steps: int, folder: Path) -> Ended:
    """Train without any kill; return what every struck run has to equal."""
    with _launch(layout, steps, folder) as run:
        run.hurry()
        return run.end()


def struck(plan: Plan, steps: int, folder: Path, tell: Callable[[str], None]) -> Ended:
    """Train, strike, and return what it came to; raise :class:`Broken` if it did not end as it must."""
    chance = random.Random(plan.seed)
    following = [*(kill.moment for kill in plan.kills[1:]), ""]
    with _launch(plan.layout, steps, folder) as run:
        for kill, then in zip(plan.kills, following, strict=True):
            struck_s = run.strike(kill, chance)
            newest = run.look_at_checkpoints()
            took_s = None
            if then not in ("restart", ""):
                run.await_begun()
                took_s = time.monotonic() - struck_s
            tell(str(Struck(kill=kill, newest=newest, recovered_s=took_s)))
        run.hurry()
        return run.end()


def _python_path() -> list[str]:
    """Return where else modules were asked to be looked for, so that another source can be struck."""
    return [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]


@contextlib.contextmanager
def _launch(layout: Layout, steps: int, folder: Path) -> Iterator["_Run"]:
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as commands:
        run = _Run(commands, layout, steps, Moments(folder))
        try:
            yield run
        finally:
            (folder / "said.txt").write_text("\n".join(map(str, run.commands)))


class _Run:
    """One ``muster train``; a launcher that is killed is followed by another, as systemd would start it."""

    def __init__(
        self, stack: contextlib.ExitStack, layout: Layout, steps: int, moments: Moments
    ) -> None:
        self._stack = stack
        self._layout = layout
        self._ranks = range(layout.ranks)
        self._steps = steps
        self._moments = moments
        self.commands: list[Launched] = []
        self._start()
        # Processes of attempts that a kill has ended, and what they left in `begun`.
        self._killed: set[int] = set()
        self._of_before: set[int] = set()
        self._begun_before: set[str] = set()

    @property
    def _command(self) -> Launched:
        return self.commands[-1]

    def _start(self) -> None:
        """Start the training, or resume it where it had begun."""
        folder = self._moments.folder
        settings = settings_of(self._layout, self._steps)
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        if any(folder.glob("runs/*/config.yaml")):
            words = ["--resume", "last"]
        flags = ("--device", "cpu", "--ranks", str(self._layout.ranks), "--max-restarts", "100")
        env = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_TESTS), *_python_path()]),
            "TORCHMUSTER_CLAIMS_DIR": str(folder / "claims"),
        }
        command = launched(
            folder, "train", *flags, "--set", f"launch.grace={_GRACE}", *words, env=env
        )
        self.commands.append(self._stack.enter_context(command))

    def strike(self, kill: Kill, chance: random.Random) -> float:
        """Bring the run to the moment, kill, and return when that was."""
        rank = 0 if kill.victim == "rank 0" else chance.choice(self._ranks[1:])
        if kill.moment == "restart":
            self._await(f"the {kill.victim}", lambda: self._victims(kill, rank))
        else:
            self.await_begun()
        time.sleep(chance.uniform(0, _RESTARTING_S if kill.moment == "restart" else _TRAINING_S))
        if kill.moment not in ("restart", "any time"):
            self._hold(kill, rank, chance)
        self._begun_before = {one.name for one in self._begun()}
        # Between looking and killing one may have gone, and another taken its place.
        self._await(f"the {kill.victim}", lambda: self._kill(self._victims(kill, rank)))
        struck_s = time.monotonic()
        self._moments.hold.unlink(missing_ok=True)
        self._moments.held.unlink(missing_ok=True)
        if kill.victim == "launcher":
            self._command.end()
            self._start()
        return struck_s

    def _hold(self, kill: Kill, rank: int, chance: random.Random) -> None:
        """Have a rank wait at the moment, so that the kill finds the run there."""
        held = rank if "rank" in kill.victim else chance.choice(self._ranks)
        if kill.moment == "collective" and "rank" in kill.victim:
            held = chance.choice([one for one in self._ranks if one != rank])  # it waits for this
        elif kill.moment in ("commit", "committed", "end"):
            held = 0
        self._moments.hold.write_text(f"{kill.moment} {held}")
        if kill.moment == "end":
            self.hurry()  # only now, or it might have ended already
        self._await(f"rank {held} at {kill.moment}", self._moments.held.exists)
        if kill.moment == "collective":
            time.sleep(chance.uniform(0.03, 0.1))  # until the others are there

    def _victims(self, kill: Kill, rank: int) -> list[psutil.Process]:
        everybody = [
            (self._role(one), one) for one in self._command.alive() if one.pid not in self._killed
        ]
        if kill.victim == "whole node":
            here = [one for role, one in everybody if role != "launcher"]
            return here if any(role == "node agent" for role, _ in everybody) else []
        wanted = f"rank {rank}" if "rank" in kill.victim else kill.victim
        of_an_attempt = "rank" in wanted  # the store outlives attempts
        return [
            one
            for role, one in everybody
            if role == wanted and not (of_an_attempt and one.pid in self._of_before)
        ]

    def _kill(self, victims: list[psutil.Process]) -> bool:
        before = {one.pid for one in self._command.alive()} if victims else set()
        hit = False
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
                self._killed.add(victim.pid)
                hit = True
        if hit:
            self._of_before |= before
        return hit

    def _role(self, process: psutil.Process) -> str:
        """Return what a process is to the run; "" if it has gone, or is none of these."""
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            for module, role in _MODULES.items():
                if module in words:
                    return role
            if any(word.endswith("/launch/node/store.py") for word in words):
                return "store"
            if any(word.endswith("/launch/rank/start.py") for word in words):
                return f"rank {process.environ().get('RANK')}"
            if process.pid == self._command.process.pid:
                return "launcher"
        return ""

    def await_begun(self) -> None:
        """Wait until every rank of a new attempt trains."""

        def all_train() -> bool:
            new = [one.name for one in self._begun() if one.name not in self._begun_before]
            return {int(name.partition(".")[0]) for name in new} == set(self._ranks)

        self._await("the next step of all ranks", all_train)

    def _begun(self) -> list[Path]:
        return list(self._moments.begun.glob("*.*"))

    def _await(self, what: str, is_there: Callable[[], object]) -> None:
        until_s = time.monotonic() + _COMES_WITHIN_S
        while not is_there():
            if self._command.process.poll() is not None:
                raise Broken(f"it ended before {what}")
            if time.monotonic() > until_s:
                raise Broken(f"{what} did not come within {_COMES_WITHIN_S:.0f} s")
            time.sleep(0.002)

    def look_at_checkpoints(self) -> str:
        """See that every committed checkpoint is whole; return what the newest one is."""
        place = next(self._moments.folder.glob("runs/*/checkpoints"), None)
        if place is None:
            return "none"
        store = open_store(place)
        newest = "none"
        for name in store.names():
            # An old one may be deleted while it is looked at; then it has no marker any more.
            findings = verify_checkpoint(store, name) and verify_checkpoint(store, name)
            newest = "unfinished" if findings else "committed"
            if any(one.name != "checkpoint-unfinished" for one in findings):
                raise Broken(f"a committed checkpoint is not whole:\n{render(findings)}")
        return newest

    def hurry(self) -> None:
        """No kill is to come any more."""
        self._moments.hurry.touch()

    def end(self) -> Ended:
        """Wait for the end that it must come to by itself; return what it came to."""
        try:
            code = self._command.end(_ENDS_WITHIN_S).code
        except subprocess.TimeoutExpired:
            raise Broken(f"it has not ended within {_ENDS_WITHIN_S:.0f} s") from None
        if code != 0:
            raise Broken(f"it ended with exit code {code}")
        for command in self.commands:
            command.wait_until_nothing_lives()
        self.look_at_checkpoints()
        return Ended.of(self._command.run, self._steps)
