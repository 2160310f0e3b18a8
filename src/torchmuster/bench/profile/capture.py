"""A training run under the recorder, on fresh ranks of this machine, and the folder that it leaves."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from torchmuster.bench.profile.recording_words import ASKED, Asked, RankFacts, read_facts
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding
from torchmuster.plan.proof import fresh_ranks

PROGRAM = "torchmuster.bench.probes.profiled"
# Fewer say nothing about how long a step takes without the profiler.
_FEWEST_STEPS = 3


def new_folder(within: Path) -> Path:
    """Make a folder that nobody has yet, named by the time."""
    name = time.strftime("%Y-%m-%d-%H%M%S")
    for number in range(1, 1000):
        folder = within / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise MusterError(
        f"no folder could be made in {within}",
        why="a thousand profiles of this second are there already",
        fix="name another place: --out",
    )


def record(asked: Asked, *, say: Callable[[str], None] = lambda _: None) -> list[RankFacts]:
    """Run the training up to the last step that is asked for; return what each rank wrote down, by rank.

    ``asked.into`` gets it all: what was asked, facts and traces. A rank that fails ends all.
    """
    into = Path(asked.into)
    request = msgspec.json.encode(asked)
    (into / ASKED).write_bytes(request)
    ran = fresh_ranks.run(
        PROGRAM,
        request.decode(),
        ranks=asked.ranks,
        device=asked.device,
        folder=asked.folder,
        name="profile",
        doing=f"{_name(asked)}, up to step {asked.last_step}",
        say=say,
    )
    if ran.trouble is not None:
        raise MusterError(
            f"{_name(asked)} failed while it was profiled",
            why=_seen(ran.trouble),
            fix=ran.trouble.fix or "see that it runs by itself first: muster run",
        )
    if len(ran.texts) != asked.ranks:
        raise MusterError(
            f"{_name(asked)} was not recorded on all ranks",
            why=f"{len(ran.texts)} of {asked.ranks} told what they saw",
            fix="does the script end its process itself (os._exit)?",
        )
    facts = read_facts(into)
    _refuse_too_few(asked, facts)
    return facts


def again(asked: Asked, into: Path, **differences: object) -> Asked:
    """Return the same question with differences, for a folder of its own."""
    return dataclasses.replace(asked, into=str(into), **differences)  # type: ignore[arg-type]


def _refuse_too_few(asked: Asked, facts: list[RankFacts]) -> None:
    fewest = min(facts, key=lambda one: len(one.steps))
    plain = [step for step in fewest.steps if not step.profiled]
    if not fewest.steps:
        raise Impossible(
            f"{_name(asked)} made no steps that could be recorded",
            why="a step is recognised by the end of torch.optim.Optimizer.step, and the first three warm up: "
            f"rank {fewest.rank} had no more",
            fix="let it train longer; an optimiser that is not of torch.optim cannot be seen",
        )
    if len(plain) < _FEWEST_STEPS or fewest.steps[-1].number < asked.last_step:
        last = fewest.steps[-1].number
        raise Impossible(
            f"{_name(asked)} ended after step {last}",
            why=f"steps {asked.first_step} to {asked.last_step} were asked for, and {_FEWEST_STEPS} before "
            "them are needed without the profiler",
            fix="let it train longer"
            if last < 12
            else f"--steps {max(8, last // 2)}:{last}, or let it train longer",
        )


def _name(asked: Asked) -> str:
    return "the training" if asked.module else Path(asked.command[0]).name


def _seen(trouble: Finding) -> str:
    """Return what became of the ranks; their logs are gone with the folder that they ran in."""
    parts = (trouble.what, trouble.why, *trouble.evidence.splitlines())
    return "\n".join(part for part in parts if part and not part.startswith("log: "))
