"""Prove a script: run the trials, compare them, and collect a result for each check."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.prove import comparing, comparing_ranks
from torchmuster.prove.comparing import Comparison, Difference
from torchmuster.prove.explanations import finding_of
from torchmuster.prove.records import PlannedStop, ProofRequest, ResumeTrial, TrialRecord
from torchmuster.prove.scaling import compare_scaled, variations_of
from torchmuster.prove.stops import HOW, stops_for
from torchmuster.prove.trials import Trials, refuse_baseline
from torchmuster.units import plural

PROPERTIES = ("determinism", "resume", "ranks")
CHECKS = (*PROPERTIES, *(f"resume.{stop}" for stop in HOW))  # the names that --only takes

Outcome = Literal["pass", "fail", "not tested"]
# What a check found: in what the runs are equal, the first difference, or why they were not tested.
Verdict = str | Difference | MusterError


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check of a property; ``name`` is unique, such as ``resume.killed``."""

    name: str
    outcome: Outcome
    finding: Finding
    difference: Difference | None = None


@dataclass(kw_only=True)
class Proof:
    """Everything that was run and found."""

    request: ProofRequest
    baseline: TrialRecord | None = None
    repeated: TrialRecord | None = None
    resumed: list[ResumeTrial] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    runs: int = 0
    took_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a property does not hold; one that could not be tested is only noted."""
        return any(result.outcome == "fail" for result in self.results)


def prove_script(request: ProofRequest, say: Callable[[str], None]) -> Proof:
    """Run everything that the requested checks need; the copies of the working folder are deleted at the end."""
    begun_s = time.monotonic()
    proof = Proof(request=request)
    with tempfile.TemporaryDirectory(
        prefix="muster-", dir="/tmp"
    ) as temporary:  # sockets need short paths
        try:
            trials = Trials(request, say, temporary)
            for name, verdict in _checks(proof, trials):
                proof.results.append(_result(name, verdict, request.allowed))
        finally:
            shutil.rmtree(Path(request.into, "trials"), ignore_errors=True)
    proof.runs = trials.runs
    proof.took_s = time.monotonic() - begun_s
    return proof


def _result(name: str, verdict: Verdict, allowed: tuple[str, ...]) -> Result:
    tested = name.partition(".")[0]
    match verdict:
        case Difference():
            is_allowed = verdict.kind in allowed
            finding = finding_of(tested, verdict, allowed=is_allowed)
            outcome: Outcome = "pass" if is_allowed else "fail"
            return Result(name=name, outcome=outcome, finding=finding, difference=verdict)
        case MusterError():
            finding = Finding(
                name=f"prove-{tested}-not-tested",
                status=Status.NOTE,
                what=f"{tested}: not tested: {verdict.what}",
                why=verdict.why,
                fix=verdict.fix,
            )
            return Result(name=name, outcome="not tested", finding=finding)
        case str():
            finding = Finding(name=f"prove-{name}", status=Status.OK, what=f"{tested}: {verdict}")
            return Result(name=name, outcome="pass", finding=finding)


def _checks(proof: Proof, trials: Trials) -> Iterator[tuple[str, Verdict]]:
    """Yield the name and the verdict of each check; all of them use the same undisturbed run."""
    request = proof.request
    baseline = proof.baseline = trials.baseline()
    if baseline.trouble:
        # Uneven batches let a rank wait in vain: name them as the cause of the failure.
        uneven = comparing_ranks.uneven_batches(baseline)
        if uneven is not None:
            yield "ranks.uneven-batches", uneven
            return
    refuse_baseline(request.script, baseline)
    compared = Comparison()
    if request.wants("determinism"):
        compared = _repeat(proof, trials, baseline)
        equal = f"two runs are bitwise equal in all {baseline.steps} steps"
        yield "determinism", compared.difference or equal
    if any(check.startswith("resume") for check in request.only):
        yield from _resume(proof, trials, baseline, compared.difference)
    if request.wants("ranks"):
        yield from _ranks(proof, baseline)
        yield from _variations(trials, request, baseline)


def _repeat(proof: Proof, trials: Trials, baseline: TrialRecord) -> Comparison:
    """Repeat the run in new interpreters."""
    script = proof.request.script
    proof.repeated = trials.run("repeated", "the same again, in new interpreters", fresh=True)
    if proof.repeated.trouble:
        raise MusterError(
            f"{script} failed when it was repeated in new interpreters",
            why=proof.repeated.trouble,
            fix=f"muster run {script}",
        )
    return comparing.compare_repeated(baseline, proof.repeated)


def _resume(
    proof: Proof, trials: Trials, baseline: TrialRecord, repeated: Difference | None
) -> Iterator[tuple[str, Verdict]]:
    """Stop and resume the script; ``repeated`` is in what two undisturbed runs differ."""
    stops = stops_for(baseline)
    if proof.request.with_run_folder:  # muster train does not use torch.save
        stops = [stop for stop in stops if stop.name != "save-killed"]
    if not stops:
        yield (
            "resume",
            Impossible(
                f"the script saved no checkpoint in its first {baseline.steps} steps",
                why="it is stopped after a checkpoint, and started again",
                fix="let it save more often, or test more --steps",
            ),
        )
        return
    if repeated is not None and repeated.kind in ("data-order", "weights"):
        yield (
            "resume",
            Impossible(
                "two undisturbed runs already differ",
                why="a resumed run cannot be compared with a run that does not repeat itself",
                fix="first fix what differs between two runs",
            ),
        )
        return
    for stop in stops:
        name = f"resume.{stop.name}"
        if proof.request.wants(name):
            trial = trials.stop_and_resume(stop, baseline)
            proof.resumed.append(trial)
            yield name, _resumed(baseline, trial, stop, exact=repeated is None)


def _resumed(
    baseline: TrialRecord, trial: ResumeTrial, stop: PlannedStop, *, exact: bool
) -> Verdict:
    if trial.stopped.newest_step >= baseline.steps:
        what = f"the script continued to its last step after {HOW[stop.name]}"
        return Impossible(what, why="no steps are left to compare")
    compared = comparing.compare_resumed(baseline, trial, exact=exact)
    if compared.difference is not None:
        return compared.difference
    equal = "equal in data and learning rate"
    if compared.rounding:
        equal = f"equal up to rounding ({compared.rounding:.0e})"
    elif exact:
        equal = "bitwise equal"
    where = f"stopped after step {stop.after_step} by {HOW[stop.name]}"
    return f"{where}, resumed from step {trial.stopped.newest_step}: {equal}"


def _ranks(proof: Proof, baseline: TrialRecord) -> Iterator[tuple[str, Verdict]]:
    differences = comparing_ranks.compare_ranks(baseline)
    if not differences and proof.repeated is not None:
        differences = comparing_ranks.compare_ranks(proof.repeated)
    for difference in differences:
        yield f"ranks.{difference.kind}", difference
    if differences:
        return
    equal = "each epoch has its own order, and loader workers their own random numbers"
    if len(baseline.ranks) > 1:
        ranks = len(baseline.ranks)
        equal = f"{ranks} ranks read different samples, and have equal weights after each step"
    yield "ranks.replicas", equal


def _variations(
    trials: Trials, request: ProofRequest, baseline: TrialRecord
) -> Iterator[tuple[str, Verdict]]:
    """Compare the same global batch on other numbers of ranks, and with more accumulation."""
    try:
        for first, *more in variations_of(request, baseline):
            expected = trials.run_variation(first)
            for variation in more:
                record = trials.run_variation(variation)
                compared = compare_scaled(expected, record, first, variation)
                verdict: Verdict = (
                    f"{variation.name} and {first.name} give the same gradients in {plural(compared.steps, 'step')} "
                    f"(norms differ by at most {compared.rounding:.1e})"
                )
                if compared.why_not:
                    verdict = Impossible("the runs cannot be compared", why=compared.why_not)
                yield f"ranks.{variation.check}", compared.difference or verdict
    except MusterError as error:  # keep the other results
        yield "ranks.scaling", error
