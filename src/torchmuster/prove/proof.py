"""Prove a script: run the trials, compare them, and collect one result for each property."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.prove import comparing
from torchmuster.prove.comparing import Difference, Property, Scaling
from torchmuster.prove.explanations import finding_of
from torchmuster.prove.records import TrialRecord
from torchmuster.prove.trials import HOW, ProofRequest, ResumeTrial, Trials, stops_for

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
    scaled: dict[str, TrialRecord] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    runs: int = 0
    took_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a property does not hold; one that could not be tested is only noted."""
        return any(result.outcome == "fail" for result in self.results)

    @property
    def script(self) -> str:
        """The name of the script."""
        return (
            Path(self.request.command[0]).name
            if not self.request.module
            else self.request.command[0]
        )


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
    with Trials(request, say).prepared() as trials:
        _Prover(proof, trials, allowed).prove(properties)
    proof.runs = trials.runs
    proof.took_s = time.monotonic() - begun_s
    return proof


class _Prover:
    def __init__(self, proof: Proof, trials: Trials, allowed: Collection[str]) -> None:
        self._proof, self._trials, self._allowed = proof, trials, allowed
        self._request = proof.request

    def prove(self, properties: Collection[str]) -> None:
        try:
            baseline = self._trials.baseline()
        except MusterError as error:
            self._explain_failed_baseline(error)
            return
        self._proof.baseline = baseline
        exact = True
        if "determinism" in properties:
            exact = self._prove_determinism(baseline)
        if "resume" in properties:
            self._prove_resume(baseline, exact=exact)
        if "ranks" in properties:
            self._prove_ranks(baseline)

    def _add(
        self,
        name: str,
        which: Property,
        difference: Difference | None,
        passed: str,
        *,
        outcome: Outcome = "pass",
        why: str = "",
        fix: str = "",
    ) -> None:
        if difference is not None:
            accepted = difference.kind in self._allowed
            finding = finding_of(difference, allowed=accepted)
            outcome = "pass" if accepted else "fail"
        else:
            tested = outcome == "pass"
            finding = Finding(
                name=f"prove-{name}" if tested else f"prove-{which}-not-tested",
                status=Status.OK if tested else Status.NOTE,
                what=f"{which}: {passed}",
                why=why,
                fix=fix,
            )
        self._proof.results.append(
            Result(
                name=name,
                property=which,
                outcome=outcome,
                finding=finding,
                difference=difference,
            )
        )

    def _explain_failed_baseline(self, error: MusterError) -> None:
        """Name a difference between ranks as the cause of a failed run, if there is one."""
        record = self._trials.failed
        found = comparing.compare_ranks(record) if record is not None and record.steps else []
        found = [one for one in found if one.kind == "uneven-batches"]
        if not found or isinstance(error, Impossible):
            raise error
        self._proof.baseline = record
        for difference in found:
            self._add(f"ranks.{difference.kind}", "ranks", difference, "")

    # ---- determinism

    def _prove_determinism(self, baseline: TrialRecord) -> bool:
        repeated = self._proof.repeated = self._trials.run(
            "repeated", "the same again, in new interpreters", fresh=True
        )
        if repeated.trouble:
            raise MusterError(
                f"{self._proof.script} failed when it was repeated in new interpreters",
                why=repeated.trouble,
                fix=f"muster run {self._proof.script}",
            )
        difference = comparing.compare_repeated(baseline, repeated)
        self._add(
            "determinism",
            "determinism",
            difference,
            f"two runs are bitwise equal in all {baseline.steps} steps",
        )
        return difference is None

    # ---- resume

    def _prove_resume(self, baseline: TrialRecord, *, exact: bool) -> None:
        stops = [one for one in stops_for(baseline) if one[0] in self._request.stops]
        if not stops:
            self._add(
                "resume",
                "resume",
                None,
                f"not tested: the script saved no checkpoint in its first {baseline.steps} steps",
                outcome="not tested",
                why="it is stopped after a checkpoint, and started again",
                fix="let it save more often (for example --save_steps 5 after the script), or test more --steps",
            )
            return
        if not exact and self._differs("determinism", "data-order", "weights"):
            self._add(
                "resume",
                "resume",
                None,
                "not tested: two undisturbed runs already differ",
                outcome="not tested",
                why="a resumed run cannot be compared with a run that does not repeat itself",
                fix="first fix what differs between two runs",
            )
            return
        for name, stop in stops:
            trial = self._trials.stop_and_resume(name, stop, baseline)
            self._proof.resumed.append(trial)
            start = max((save.step for save in trial.stopped.saves), default=0)
            if start >= baseline.steps:
                self._add(
                    f"resume.{name}",
                    "resume",
                    None,
                    f"not tested: the script continued to its last step after {HOW[stop.how]}",
                    outcome="not tested",
                    why="no steps are left to compare",
                )
                continue
            found = comparing.compare_resumed(baseline, trial, exact=exact)
            equal = "bitwise equal" if exact else "equal in data and learning rate"
            if found.rounding:
                equal = f"equal up to rounding ({found.rounding:.0e})"
            self._add(
                f"resume.{name}",
                "resume",
                found.difference,
                f"stopped after step {stop.after_step} by {HOW[stop.how]}, resumed from step {start}: {equal}",
            )

    def _differs(self, which: Property, *kinds: str) -> bool:
        return any(
            result.difference is not None
            and result.property == which
            and result.difference.kind in kinds
            for result in self._proof.results
        )

    # ---- ranks

    def _prove_ranks(self, baseline: TrialRecord) -> None:
        differences = comparing.compare_ranks(baseline)
        if not differences and self._proof.repeated is not None:
            differences = comparing.compare_ranks(self._proof.repeated)
        for difference in differences:
            self._add(f"ranks.{difference.kind}", "ranks", difference, "")
        if not differences:
            many = len(baseline.ranks) > 1
            passed = (
                f"{len(baseline.ranks)} ranks read different samples, and have equal weights after each step"
                if many
                else "each epoch has its own order, and loader workers their own random numbers"
            )
            self._add("ranks.replicas", "ranks", None, passed)
        try:
            self._prove_scaling(baseline)
        except MusterError as error:  # keep the other results
            self._add(
                "ranks.scaling",
                "ranks",
                None,
                f"not tested: {error.what}",
                outcome="not tested",
                why=error.why,
                fix=error.fix,
            )

    def _prove_scaling(self, baseline: TrialRecord) -> None:
        request = self._request
        batch = self._batch_size(baseline)
        flag = _flag(request.batch_argument)
        if request.other_ranks and (flag or request.with_run_folder):
            total = batch * request.ranks
            counts = sorted({request.ranks, *request.other_ranks})
            impossible = [count for count in counts if total % count]
            if impossible:
                raise Impossible(
                    f"a global batch of {total} cannot be split over {impossible[0]} ranks",
                    why=f"{request.ranks} ranks have {batch} samples each",
                    fix=f"set {flag} so that {impossible[0]} divides it, or leave out --ranks {impossible[0]}",
                )
            for count in counts:
                words = (flag, str(total // count)) if flag else ()
                self._scaled_run(f"{count} ranks" if count > 1 else "1 rank", count, words)
            self._compare_scaled([f"{n} ranks" if n > 1 else "1 rank" for n in counts], counts)
        elif request.other_ranks:
            self._add(
                "ranks.scaling",
                "ranks",
                None,
                "not tested: whether other numbers of ranks give the same gradients",
                outcome="not tested",
                why="the global batch must stay the same",
                fix="name the script's argument for the batch per rank, for example --batch-arg batch_size",
            )
        if request.accumulation_argument:
            self._prove_accumulation(batch)

    def _scaled_run(self, name: str, ranks: int, words: Sequence[str]) -> None:
        record = self._trials.run(
            name.replace(" ", "-"),
            f"{name}, without dropout" + (f": {' '.join(words)}" if words else ""),
            ranks=ranks,
            arguments=tuple(words),
            dropout=False,
        )
        if record.trouble or not record.steps:
            raise MusterError(
                f"{self._proof.script} failed with {name}",
                why=record.trouble,
                fix="leave out this number of ranks: --ranks",
            )
        self._proof.scaled[name] = record

    def _compare_scaled(self, names: Sequence[str], counts: Sequence[int]) -> None:
        for name, count in zip(names[1:], counts[1:], strict=True):
            scaling = comparing.compare_scaled(
                self._proof.scaled[names[0]],
                self._proof.scaled[name],
                names=(names[0], name),
                ratio=count / counts[0],
                accumulation=False,
            )
            self._add_scaling(f"ranks.{name.replace(' ', '-')}", scaling, names[0], name)

    def _add_scaling(self, name: str, scaling: Scaling, few: str, many: str) -> None:
        if scaling.why_not:
            self._add(
                name,
                "ranks",
                None,
                f"not tested: {many} against {few}",
                outcome="not tested",
                why=scaling.why_not,
            )
            return
        self._add(
            name,
            "ranks",
            scaling.difference,
            f"{many} and {few} give the same gradients in {scaling.steps} steps (norms differ by at most "
            f"{scaling.largest:.1e})",
        )

    def _prove_accumulation(self, batch: int) -> None:
        request = self._request
        flag, batch_flag = _flag(request.accumulation_argument), _flag(request.batch_argument)
        if not batch_flag or batch % 2:
            raise Impossible(
                "--accumulation-arg needs --batch-arg, and an even batch per rank",
                why="half the batch is used with twice the accumulation"
                + (f"; the batch is {batch}" if batch_flag else ""),
                fix="--batch-arg NAME --accumulation-arg NAME",
            )
        now = int(_value_of(request.command, flag) or 1)
        few, many = f"{now} micro-batches per step", f"{2 * now} micro-batches per step"
        few = few.replace("1 micro-batches", "1 micro-batch")
        self._scaled_run(few, request.ranks, (batch_flag, str(batch), flag, str(now)))
        self._scaled_run(many, request.ranks, (batch_flag, str(batch // 2), flag, str(2 * now)))
        scaling = comparing.compare_scaled(
            self._proof.scaled[few],
            self._proof.scaled[many],
            names=(few, many),
            ratio=2.0,
            accumulation=True,
        )
        self._add_scaling("ranks.accumulation", scaling, few, many)

    def _batch_size(self, baseline: TrialRecord) -> int:
        """Return the samples per rank and micro-batch: of the script's argument, or as recorded."""
        given = _value_of(self._request.command, _flag(self._request.batch_argument))
        if given and given.isdecimal():
            return int(given)
        return max(
            len(batch.samples) for step in baseline.ranks[0].steps for batch in step.micro_batches
        )


def _flag(name: str) -> str:
    return name if not name or name.startswith("-") else f"--{name}"


def _value_of(command: Sequence[str], flag: str) -> str:
    """Return the value of an argument in a command; "" if it is not there."""
    if not flag:
        return ""
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else next(iter(command[place + 1 : place + 2]), "")
    return ""
