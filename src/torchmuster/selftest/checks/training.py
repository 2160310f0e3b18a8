"""Checks of training steps: exactness, precisions, skipped steps, waits for the device, overhead, torch.compile."""

import math
import statistics
from collections.abc import Sequence

from torchmuster.selftest.check import Check, Facts, NotHere, Outcome, Place

_PROGRAM = "training"
_EXACT = 1e-5  # relative: sums in another order, in float32
_EXACT_WEIGHTS = 1e-3  # relative to the norm of all weights: Adam divides by small numbers
_NEAR = {"bf16": 0.02, "fp16": 0.02}  # relative difference of the last losses
_MOST_OVERHEAD = {"cpu": 1.5, "gpu": 1.15}
_COMPILED = 1e-3


def _strategies(place: Place, planted: bool) -> Facts:
    if place.ranks < 2:
        raise NotHere("needs 2 GPUs")
    return place.on_ranks(_PROGRAM, "strategies", planted=planted)[0]


def judge_strategies(facts: Facts) -> Outcome:
    """Compare losses and weights of each strategy with those of one device."""
    losses = dict(facts["losses"])
    alone = losses.pop("alone")
    off = {name: largest_difference(values, alone) for name, values in losses.items()}
    weights = facts["weights"]
    good = all(one <= _EXACT for one in off.values())
    good = good and all(one <= _EXACT_WEIGHTS for one in weights.values())
    worst = max(off, key=lambda name: off[name])
    return Outcome(
        confirmed=good,
        says=f"{', '.join(off)} against one device ({facts['backend']}): losses differ by at most "
        f"{off[worst]:.1e} ({worst}), weights by {max(weights.values()):.1e}",
        figures={f"{name}_losses": one for name, one in off.items()}
        | {f"{name}_weights": one for name, one in weights.items()},
    )


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two lists; infinite for other lengths, and for numbers that are not finite."""
    if len(ours) != len(theirs) or not theirs or not all(map(math.isfinite, (*ours, *theirs))):
        return math.inf
    pairs = zip(ours, theirs, strict=True)
    return max(abs(one - other) / max(abs(other), 1e-30) for one, other in pairs)


def _precision(place: Place, planted: bool) -> Facts:
    return place.on_ranks(_PROGRAM, "precisions", planted=planted, ranks=1)[0]


def judge_precision(facts: Facts) -> Outcome:
    """Compare the last losses of bf16 and fp16 with those of fp32."""
    last = {
        name: statistics.fmean(values[-3:] or [math.nan])
        for name, values in facts["losses"].items()
    }
    off = {name: abs(last[name] - last["fp32"]) / last["fp32"] for name in last if name != "fp32"}
    good = bool(off) and all(off[name] <= _NEAR[name] for name in off)
    return Outcome(
        confirmed=good,
        says="last losses differ from fp32 by "
        + ", ".join(f"{100 * one:.2g} % ({name})" for name, one in off.items()),
        figures=off,
    )


def _skipped(place: Place, planted: bool) -> Facts:
    return {"ranks": place.on_ranks(_PROGRAM, "skipped-step", planted=planted)}


def judge_skipped(facts: Facts) -> Outcome:
    """A step with a gradient that is not finite changes nothing on any rank, and the next one does."""
    wrong = [
        f"{name} on rank {rank}"
        for rank, ways in enumerate(facts["ranks"])
        for name, one in ways.items()
        if one != {"applied": False, "same": True, "applied_later": True, "moved_later": True}
    ]
    says = f"{', '.join(facts['ranks'][0])}: the step was skipped on all ranks, bit by bit"
    return Outcome(
        confirmed=not wrong,
        says=f"not skipped exactly: {', '.join(wrong)}" if wrong else says,
        figures={"ranks": len(facts["ranks"]), "wrong": len(wrong)},
    )


def _syncs(place: Place, planted: bool) -> Facts:
    return place.on_ranks(_PROGRAM, "host-syncs", planted=planted)[0]


def judge_syncs(facts: Facts) -> Outcome:
    """No strategy makes the host wait for the device in a step."""
    waits = {name: places for name, places in facts.items() if places}
    said = "; ".join(f"{name}: {', '.join(places)}" for name, places in waits.items())
    return Outcome(
        confirmed=not waits,
        says=f"the host waits in a step: {said}"
        if waits
        else f"{', '.join(facts)}: no wait in a step",
        figures={name: len(places) for name, places in facts.items()},
    )


def _overhead(place: Place, planted: bool) -> Facts:
    measured = place.on_ranks(_PROGRAM, "overhead", planted=planted, ranks=1)[0]
    return {"device": place.device, **measured}


def judge_overhead(facts: Facts) -> Outcome:
    """A step takes at most a little longer than a bare loop of torch."""
    ratio, limit = facts["torchmuster"] / facts["bare"], _MOST_OVERHEAD[facts["device"]]
    return Outcome(
        confirmed=ratio <= limit,
        says=f"a step takes {facts['torchmuster'] * 1e3:.1f} ms, {ratio:.2f} times a bare loop's "
        f"({facts['bare'] * 1e3:.1f} ms); at most {limit:g} expected",
        figures={"ratio": ratio, "bare_s": facts["bare"], "torchmuster_s": facts["torchmuster"]},
    )


def _compile(place: Place, planted: bool) -> Facts:
    caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), place.folder)
    return place.on_ranks(_PROGRAM, "compile", planted=planted, ranks=1, environment=caches)[0]


def judge_compile(facts: Facts) -> Outcome:
    """Compiled blocks give the same losses."""
    off = largest_difference(facts["compiled"], facts["eager"])
    return Outcome(
        confirmed=off <= _COMPILED,
        says=f"compiled and eager losses differ by at most {off:.1e}",
        figures={"difference": off, "seconds": facts["seconds"]},
    )


CHECKS = (
    Check(
        id="strategies",
        question="do ddp, fsdp and hybrid sharding give the losses and weights of one device?",
        fault="rank 1 multiplies its loss by 2",
        needs=(),
        seconds=30,
        measure=_strategies,
        judge=judge_strategies,
    ),
    Check(
        id="precision",
        question="does training in bf16 and fp16 stay near fp32?",
        fault="bf16 trains with three times the learning rate",
        needs=(),
        seconds=25,
        measure=_precision,
        judge=judge_precision,
    ),
    Check(
        id="skipped-step",
        question="does the device skip a step whose gradients are not finite, on all ranks?",
        fault="a weight changes in the skipped step",
        needs=(),
        seconds=25,
        measure=_skipped,
        judge=judge_skipped,
    ),
    Check(
        id="host-syncs",
        question="does the host ever wait for the device in a step?",
        fault="the loss is read on the host in each step",
        needs=(),
        seconds=25,
        measure=_syncs,
        judge=judge_syncs,
    ),
    Check(
        id="overhead",
        question="how long does a step take compared with a bare loop of torch?",
        fault="each step is computed twice",
        needs=(),
        seconds=25,
        measure=_overhead,
        judge=judge_overhead,
    ),
    Check(
        id="compile",
        question="does torch.compile give the same losses?",
        fault="the compiled training gets other data",
        needs=(),
        seconds=90,
        measure=_compile,
        judge=judge_compile,
    ),
)
