"""Prove a script: run the trials, compare them, and collect a result for each check."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.prove import comparing, comparing_ranks
from torchmuster.prove.comparing import Comparison, Difference
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
PROPERTIES = ("determinism", "resume", "ranks")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check of a property; ``name`` is unique, such as ``resume.killed``."""

    name: str
    outcome: Outcome
    finding: Finding
    difference: Difference | None = None

    @property
    def tested(self) -> str:
        """The property that is tested: the part of the name before the point."""
        return self.name.partition(".")[0]


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
    proof = Proof(request=request)
    with Trials.prepared(request, say) as trials:
        Prover(proof, trials, allowed).prove(properties)
    proof.runs = trials.runs
    proof.took_s = time.monotonic() - begun_s
    return proof


class Prover:
    """Runs the trials of each property, and adds the results to ``proof``."""

    def __init__(self, proof: Proof, trials: Trials, allowed: Collection[str]) -> None:
        self.proof = proof
        self._trials, self._allowed = trials, allowed

    def prove(self, properties: Collection[str]) -> None:
        """Prove these properties, from the same undisturbed run."""
        try:
            baseline = self.proof.baseline = self._trials.baseline()
        except FailedBaseline as error:
            # Uneven batches let a rank wait in vain: name them as the cause of the failure.
            self.proof.baseline = error.record
            differences = comparing_ranks.compare_ranks(error.record)
            uneven = [found for found in differences if found.kind == "uneven-batches"]
            if not uneven:
                raise
            for difference in uneven:
                self._conclude("ranks.uneven-batches", Comparison(difference=difference))
            return
        exact = True
        if "determinism" in properties:
            exact = self._prove_determinism(baseline)
        if "resume" in properties:
            self._prove_resume(baseline, exact=exact)
        if "ranks" in properties:
            self._prove_ranks(baseline)
            self._prove_variations(baseline)

    # ---- results

    def _conclude(self, name: str, comparison: Comparison, equal: str = "") -> None:
        tested, difference = name.partition(".")[0], comparison.difference
        outcome: Outcome = "pass"
        finding = Finding(name=f"prove-{name}", status=Status.OK, what=f"{tested}: {equal}")
        if comparison.why_not:
            self._untested(name, "the runs cannot be compared", comparison.why_not)
            return
        if difference is not None:
            is_allowed = difference.kind in self._allowed
            finding = finding_of(tested, difference, allowed=is_allowed)
            outcome = "pass" if is_allowed else "fail"
        result = Result(name=name, outcome=outcome, finding=finding, difference=difference)
        self.proof.results.append(result)

    def _untested(self, name: str, what: str, why: str, fix: str = "") -> None:
        tested = name.partition(".")[0]
        finding = Finding(
            name=f"prove-{tested}-not-tested",
            status=Status.NOTE,
            what=f"{tested}: not tested: {what}",
            why=why,
            fix=fix,
        )
        self.proof.results.append(Result(name=name, outcome="not tested", finding=finding))

    # ---- properties

    def _prove_determinism(self, baseline: TrialRecord) -> bool:
        """Repeat the run in new interpreters; return whether it is the same."""
        repeated = self._trials.run("repeated", "the same again, in new interpreters", fresh=True)
        if repeated.trouble:
            raise MusterError(
                f"{self.proof.request.script} failed when it was repeated in new interpreters",
                why=repeated.trouble,
                fix=f"muster run {self.proof.request.script}",
            )
        self.proof.repeated = repeated
        compared = comparing.compare_repeated(baseline, repeated)
        equal = f"two runs are bitwise equal in all {baseline.steps} steps"
        self._conclude("determinism", compared, equal)
        return compared.difference is None

    def _prove_resume(self, baseline: TrialRecord, *, exact: bool) -> None:
        stops = [stop for stop in stops_for(baseline) if stop.name in self.proof.request.stops]
        if not stops:
            self._untested(
                "resume",
                f"the script saved no checkpoint in its first {baseline.steps} steps",
                "it is stopped after a checkpoint, and started again",
                "let it save more often, or test more --steps",
            )
            return
        kinds = [result.difference.kind for result in self.proof.results if result.difference]
        if "data-order" in kinds or "weights" in kinds:  # of the repeated run
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
                what = f"the script continued to its last step after {HOW[stop.name]}"
                self._untested(name, what, "no steps are left to compare")
                continue
            resumed = comparing.compare_resumed(baseline, trial, exact=exact)
            equal = "equal in data and learning rate"
            if resumed.apart:
                equal = f"equal up to rounding ({resumed.apart:.0e})"
            elif exact:
                equal = "bitwise equal"
            what = f"stopped after step {stop.after_step} by {HOW[stop.name]}, "
            self._conclude(name, resumed, f"{what}resumed from step {trial.newest_step}: {equal}")

    def _prove_ranks(self, baseline: TrialRecord) -> None:
        differences = comparing_ranks.compare_ranks(baseline)
        if not differences and self.proof.repeated is not None:
            differences = comparing_ranks.compare_ranks(self.proof.repeated)
        for difference in differences:
            self._conclude(f"ranks.{difference.kind}", Comparison(difference=difference))
        if differences:
            return
        what = "each epoch has its own order, and loader workers their own random numbers"
        if len(baseline.ranks) > 1:
            ranks = len(baseline.ranks)
            what = f"{ranks} ranks read different samples, and have equal weights after each step"
        self._conclude("ranks.replicas", Comparison(), what)

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
            comparison = comparing_ranks.compare_scaled(expected, record, first, variation)
            same = f"{variation.name} and {first.name} give the same gradients"
            steps, apart = plural(comparison.steps, "step"), comparison.apart
            text = f"{same} in {steps} (norms differ by at most {apart:.1e})"
            self._conclude(f"ranks.{variation.check}", comparison, text)
