"""Fit the shares of a machine's rates that training reaches to real steps.

On the CPU three runs of a few blocks are used. One process with all cores shows the share of the
memory bandwidth that operations reach; DDP shows the same for ranks with a part of the cores each,
whose operations do not use several threads; FSDP shows the share of the collectives' rates that is
left if collectives and products use the same cores.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchmuster.errors import MusterError
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.proof import verification
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.timing import forecast as timing
from torchmuster.plan.timing.calibration import Calibration, calibrated_rates, hardware_as_measured
from torchmuster.plan.timing.rates import Rates
from torchmuster.train.strategies.sharding import ShardLayout

TURNS = 2  # candidates alternate, because the speed of a shared machine changes over time
_BLOCKS = 4  # of a model, in the runs used for fitting: few enough for any machine
_LOWEST_SHARE, _HIGHEST_SHARE = 0.001, 1000.0


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """A timed training run with its traces."""

    records: tuple[TraceRecord, ...]
    candidate: Candidate
    hardware: Hardware
    step_s: float
    words: str = field(default="one real run")


def fit_rates(run: RealRun, known: Rates, *, both: bool = False) -> Rates:
    """Return rates that reproduce the time of the run, by fitting one constant.

    The constant is the share of the memory bandwidth if products were measured separately; with
    ``both`` it scales products and memory alike, for hardware of which nothing else is known.
    """

    def slower(share: float) -> Rates:
        compute = known.compute * share if both else known.compute
        return dataclasses.replace(known, compute=compute, memory=known.memory * share)

    fitted = _fitted(run, slower)
    if fitted is None and not both:  # products alone take longer: their measured rate is too low
        return fit_rates(run, known, both=True)
    if fitted is None:
        least, most = (_takes(run, slower(share)) for share in (_HIGHEST_SHARE, _LOWEST_SHARE))
        raise MusterError(
            f"the rates cannot be fitted to a step of {run.step_s:.3g} s",
            why=f"with any share of the rates a step takes from {least:.3g} to {most:.3g} s",
            fix="calibrate with a run that computes more and communicates less",
        )
    return dataclasses.replace(fitted, source=f"{known.source}, fitted to {run.words}")


def _fit_sharded(run: RealRun, known: Rates) -> Rates:
    """Return rates whose sharded collectives reproduce the run's time; unchanged if none do."""

    def slower(share: float) -> Rates:
        share *= known.sharded_communication
        return dataclasses.replace(known, sharded_communication=share)

    return _fitted(run, slower) or known


def _fitted(run: RealRun, slower: Callable[[float], Rates]) -> Rates | None:
    """Return the rates with the fitted share; None if there is none."""
    low, high = _LOWEST_SHARE, _HIGHEST_SHARE
    if not _takes(run, slower(high)) < run.step_s < _takes(run, slower(low)):
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _takes(run, slower(middle)) > run.step_s else (low, middle)
    return slower(low)


def _takes(run: RealRun, assumed: Rates) -> float:
    return timing.predict_time(
        run.records, run.candidate, hardware=run.hardware, rates=assumed
    ).step_s


def with_fit(calibration: Calibration, run: RealRun) -> Calibration:
    """Return the calibration with its shares fitted to a real run.

    They apply to the run's number of ranks and to more, until a run with more ranks is fitted.
    """
    known = calibrated_rates(calibration, run.hardware)
    sharded = run.candidate.strategy == "fsdp"
    fitted = _fit_sharded(run, known) if sharded else fit_rates(run, known)
    by_ranks = {
        number: one
        if number < run.candidate.layout.ranks
        else dataclasses.replace(
            one,
            compute=fitted.compute,
            memory=fitted.memory,
            sharded_communication=fitted.sharded_communication,
        )
        for number, one in calibration.by_ranks.items()
    }
    words = ", ".join(filter(None, [calibration.fitted_to, run.words]))
    return dataclasses.replace(calibration, by_ranks=by_ranks, fitted_to=words)


def fit_here(
    calibration: Calibration,
    work: Work,
    hardware: Hardware,
    look: Callable[[Sequence[TraceRequest]], Sequence[object]],
    *,
    steps: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Return the calibration fitted to real steps of a few blocks of the model on this machine.

    ``look`` traces. A model that cannot be traced leaves the calibration as it is.
    """
    on_cpu = hardware.card.kind == "cpu"
    most = max(
        (number for number in calibration.by_ranks if number <= (calibration.cores or 1)), default=1
    )
    traced: dict[Candidate, TraceRecord] = {}
    for candidate in fit_candidates(most if on_cpu else 1):
        asked = TraceRequest(
            work=work, candidate=candidate, blocks=_BLOCKS, kernels="cpu" if on_cpu else "cuda"
        )
        (record,) = look([asked])
        if not isinstance(record, TraceRecord):
            break
        traced[candidate] = record
    model = work.model_name_or_path or work.build
    best_s = _best_steps(work, list(traced), "cpu" if on_cpu else "gpu", steps=steps, say=say)
    for candidate, record in traced.items():
        so_many = dataclasses.replace(hardware, cards_per_machine=candidate.layout.ranks)
        run = RealRun(
            records=(dataclasses.replace(record, blocks=record.blocks_traced),),
            candidate=candidate,
            hardware=hardware_as_measured(calibration, so_many),
            step_s=best_s[candidate],
            words=f"{record.blocks_traced} blocks of {model} {describe_fit(candidate)}",
        )
        calibration = with_fit(calibration, run)
    return calibration


def _best_steps(
    work: Work,
    candidates: Sequence[Candidate],
    device: Literal["cpu", "gpu"],
    *,
    steps: int,
    say: Callable[[str], None],
) -> dict[Candidate, float]:
    """Return the best step time of each; a step takes as long as on its slowest rank."""
    best_s = dict.fromkeys(candidates, math.inf)
    for candidate in [*candidates] * TURNS:
        ran = verification.run_real_steps(
            *(work, candidate),
            ranks=candidate.layout.ranks,
            device=device,
            steps=steps,
            blocks=_BLOCKS,
            say=say,
        )
        slowest = (max(times) for times in zip(*(one.step_s for one in ran), strict=True))
        best_s[candidate] = min(best_s[candidate], *slowest)
    return best_s


def fit_candidates(ranks: int) -> list[Candidate]:
    """Return the candidates to fit, up to ``ranks`` ranks, in the order of fitting."""
    found = [Candidate(strategy="single", layout=ShardLayout(copies=1, shards=1))]
    if ranks > 1:
        found.append(Candidate(strategy="ddp", layout=ShardLayout(copies=ranks, shards=1)))
        found.append(Candidate(strategy="fsdp", layout=ShardLayout(copies=1, shards=ranks)))
    return found


def describe_fit(candidate: Candidate) -> str:
    """Describe how a model was trained."""
    if candidate.strategy == "single":
        return "in one process"
    return f"by {candidate.strategy} on {candidate.layout.ranks} ranks"
