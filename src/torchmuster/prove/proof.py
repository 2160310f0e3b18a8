"""Prove a script: run the trials, compare them, and collect a result for each check."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.prove import comparing, comparing_ranks
from torchmuster.prove.comparing import Difference, Property
from torchmuster.prove.comparing_ranks import Variation
from torchmuster.prove.explanations import finding_of
from torchmuster.prove.records import TrialRecord
from torchmuster.prove.trials import (
    HOW,
    FailedBaseline,
    ProofRequest,
    ResumeTrial,
    Trials,
    stops_for,
)
from torchmuster.units import plural

Outcome = Literal["pass", "fail", "not tested"]
PROPERTIES: tuple[Property, ...] = ("determinism", "resume", "ranks")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check of a property; ``name`` is unique, such as ``resume.killed``."""

    name: str
    property: Property
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


def prove_script(
    request: ProofRequest,
    *,
    properties: Collection[str],
    allowed: Collection[str],
    say: Callable[[str], None],
) -> Proof:
    """Run everything that the properties need."""
    begun_s = time.monotonic()
    with Trials.prepared(request, say) as trials:
        prover = Prover(request, trials, allowed)
        prover.prove(properties)
    prover.proof.runs = trials.runs
    prover.proof.took_s = time.monotonic() - begun_s
    return prover.proof


class Prover:
    """Runs the trials of each property, and adds the results to ``proof``."""

    def __init__(self, request: ProofRequest, trials: Trials, allowed: Collection[str]) -> None:
        self.proof = Proof(request=request)
        self._request, self._trials, self._allowed = request, trials, allowed

    def prove(self, properties: Collection[str]) -> None:
        """Prove these properties, from the same undisturbed run."""
        try:
            baseline = self.proof.baseline = self._trials.baseline()
        except FailedBaseline as error:
            self._explain_failed_baseline(error)
            return
        exact = True
        if "determinism" in properties:
            exact = self._prove_determinism(baseline)
        if "resume" in properties:
            self._prove_resume(baseline, exact=exact)
        if "ranks" in properties:
            self._prove_ranks(baseline)
            self._prove_variations(baseline)

    def _explain_failed_baseline(self, error: FailedBaseline) -> None:
        """Name a difference between ranks as the cause of a failed run, if there is one."""
        differences = comparing_ranks.compare_ranks(error.record)
        uneven = [difference for difference in differences if difference.kind == "uneven-batches"]
        if not uneven:
            raise error
        self.proof.baseline = error.record
        for difference in uneven:
            self._differs("ranks.uneven-batches", difference)

    # ---- results

    def _passed(self, name: str, what: str) -> None:
        finding = Finding(name=f"prove-{name}", status=Status.OK, what=what)
        self._add(name, "pass", finding)

    def _untested(self, name: str, what: str, why: str, fix: str = "") -> None:
        text = f"{_property(name)}: not tested: {what}"
        finding = Finding(
            name=f"prove-{_property(name)}-not-tested",
            status=Status.NOTE,
            what=text,
            why=why,
            fix=fix,
        )
        self._add(name, "not tested", finding)

    def _differs(self, name: str, difference: Difference) -> None:
        is_allowed = difference.kind in self._allowed
        outcome: Outcome = "fail"
        if is_allowed:
            outcome = "pass"
        self._add(name, outcome, finding_of(difference, allowed=is_allowed), difference)

    def _add(
        self, name: str, outcome: Outcome, finding: Finding, difference: Difference | None = None
    ) -> None:
        self.proof.results.append(
            Result(
                name=name,
                property=_property(name),
                outcome=outcome,
                finding=finding,
                difference=difference,
            )
        )

    # ---- properties

    def _prove_determinism(self, baseline: TrialRecord) -> bool:
        """Repeat the run in new interpreters; return whether it is the same."""
        repeated = self._trials.run("repeated", "the same again, in new interpreters", fresh=True)
        if repeated.trouble:
            raise MusterError(
                f"{self._request.script} failed when it was repeated in new interpreters",
                why=repeated.trouble,
                fix=f"muster run {self._request.script}",
            )
        self.proof.repeated = repeated
        difference = comparing.compare_repeated(baseline, repeated)
        if difference is not None:
            self._differs("determinism", difference)
            return False
        what = f"determinism: two runs are bitwise equal in all {baseline.steps} steps"
        self._passed("determinism", what)
        return True

    def _prove_resume(self, baseline: TrialRecord, *, exact: bool) -> None:
        stops = [stop for stop in stops_for(baseline) if stop.name in self._request.stops]
        if not stops:
            self._untested(
                "resume",
                f"the script saved no checkpoint in its first {baseline.steps} steps",
                "it is stopped after a checkpoint, and started again",
                "let it save more often, or test more --steps",
            )
            return
        if self._repeats_otherwise():
            self._untested(
                "resume",
                "two undisturbed runs already differ",
                "a resumed run cannot be compared with a run that does not repeat itself",
                "first fix what differs between two runs",
            )
            return
        for stop in stops:
            name = f"resume.{stop.name}"
            trial = self._trials.stop_and_resume(stop, baseline)
            self.proof.resumed.append(trial)
            if trial.newest_step >= baseline.steps:
                what = f"the script continued to its last step after {HOW[stop.how]}"
                self._untested(name, what, "no steps are left to compare")
                continue
            resumed = comparing.compare_resumed(baseline, trial, exact=exact)
            if resumed.difference is not None:
                self._differs(name, resumed.difference)
                continue
            equal = "equal in data and learning rate"
            if resumed.rounding:
                equal = f"equal up to rounding ({resumed.rounding:.0e})"
            elif exact:
                equal = "bitwise equal"
            self._passed(
                name,
                f"resume: stopped after step {stop.after_step} by {HOW[stop.how]}, "
                f"resumed from step {trial.newest_step}: {equal}",
            )

    def _repeats_otherwise(self) -> bool:
        """Return whether two undisturbed runs begin with other weights or read other data."""
        for result in self.proof.results:
            difference = result.difference
            if difference is not None and difference.kind in ("data-order", "weights"):
                return True
        return False

    def _prove_ranks(self, baseline: TrialRecord) -> None:
        differences = comparing_ranks.compare_ranks(baseline)
        if not differences and self.proof.repeated is not None:
            differences = comparing_ranks.compare_ranks(self.proof.repeated)
        for difference in differences:
            self._differs(f"ranks.{difference.kind}", difference)
        if differences:
            return
        what = "each epoch has its own order, and loader workers their own random numbers"
        if len(baseline.ranks) > 1:
            ranks = len(baseline.ranks)
            what = f"{ranks} ranks read different samples, and have equal weights after each step"
        self._passed("ranks.replicas", f"ranks: {what}")

    # ---- the same global batch on other numbers of ranks, and with more accumulation

    def _prove_variations(self, baseline: TrialRecord) -> None:
        try:
            for variations in self._trials.variations(baseline):
                self._compare(variations)
        except MusterError as error:  # keep the other results
            self._untested("ranks.scaling", error.what, error.why, error.fix)

    def _compare(self, variations: list[Variation]) -> None:
        first, *more = variations
        expected = self._trials.run_variation(first)
        for variation in more:
            record = self._trials.run_variation(variation)
            scaling = comparing_ranks.compare_scaled(expected, record, first, variation)
            name = f"ranks.{variation.check}"
            pair = f"{variation.name} and {first.name}"
            if scaling.why_not:
                self._untested(name, pair, scaling.why_not)
            elif scaling.difference is not None:
                self._differs(name, scaling.difference)
            else:
                self._passed(
                    name,
                    f"ranks: {pair} give the same gradients in {plural(scaling.steps, 'step')} "
                    f"(norms differ by at most {scaling.largest:.1e})",
                )


def _property(name: str) -> Property:
    """Return the property of a check: the part of its name before the point."""
    for known in PROPERTIES:
        if name.partition(".")[0] == known:
            return known
    raise ValueError(name)
