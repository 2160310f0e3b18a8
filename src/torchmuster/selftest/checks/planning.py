"""Checks of the planner: planned memory and time against real steps on this hardware."""

import statistics
from dataclasses import dataclass, replace
from typing import Literal

from torchmuster.decision import Decision
from torchmuster.plan import planning
from torchmuster.plan.hardware import here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Recompute, Work
from torchmuster.plan.proof.comparison import MEMORY_BAND, TIME_BAND
from torchmuster.plan.proof.verification import run_real_steps
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.timing import calibration, fitting
from torchmuster.plan.timing.rates import Rates, usual_rates
from torchmuster.plan.tracing.tracer import Tracer
from torchmuster.selftest.check import Check, Facts, Outcome, Place

_MODELS = {
    "cpu": "torchmuster.bench.probes.small_gpt:make_small_gpt",
    "gpu": "torchmuster.bench.probes.small_gpt:make_medium_gpt",
}
_STEPS = 5
_FEW = 4  # cases on a CPU, and of times
_RESERVED_BAND = 2 * MEMORY_BAND


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration to plan and to run."""

    strategy: Literal["single", "ddp", "fsdp"]
    precision: Literal["fp32", "bf16"]
    recompute: Recompute
    micro_batch_size: int

    def __str__(self) -> str:
        return f"{self.strategy} {self.precision} batch {self.micro_batch_size} recompute {self.recompute}"


def _cases(place: Place) -> list[Case]:
    """Return 20 cases for GPUs, 4 for the CPU."""
    if place.device == "cpu":
        return [
            Case(strategy="single", precision="fp32", recompute="none", micro_batch_size=4),
            Case(strategy="single", precision="bf16", recompute="full", micro_batch_size=4),
            Case(strategy="ddp", precision="fp32", recompute="none", micro_batch_size=2),
            Case(strategy="fsdp", precision="bf16", recompute="none", micro_batch_size=4),
        ]
    several: list[Literal["single", "ddp", "fsdp"]] = ["single", "ddp", "fsdp"]
    all_of_them = [
        Case(strategy=strategy, precision=precision, recompute=recompute, micro_batch_size=size)
        for strategy in (several if place.ranks > 1 else several[:1])
        for precision in ("fp32", "bf16")
        for recompute in ("none", "full")
        for size in ((4, 16) if place.ranks > 1 else (1, 2, 4, 8, 16))
    ]
    return all_of_them[:20]


def _plan_memory(place: Place, planted: bool) -> Facts:
    with Tracer(cache=None) as tracer:
        return {"cases": [_compared(one, place, tracer, planted) for one in _cases(place)]}


def _plan_time(place: Place, planted: bool) -> Facts:
    work, ranks = _work(place), 1
    with Tracer(cache=None) as tracer:
        hardware = _hardware(place, ranks)
        known = calibration.measure_calibration([ranks], device=place.device)
        known = fitting.fit_here(known, work, hardware, tracer.records)
        hardware, rates = calibration.as_known(known, hardware)
        cases = [one for one in _cases(place) if one.strategy == "single"][:_FEW]
        return {
            "cases": [
                _compared(one, place, tracer, planted, hardware=hardware, rates=rates)
                for one in cases
            ]
        }


def _work(place: Place) -> Work:
    return Work(
        build=_MODELS[place.device],
        loss="language_model",
        sequence_length=128,
        folder=place.folder,
    )


def _hardware(place: Place, ranks: int) -> Hardware:
    environment = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    return here.hardware_here(
        ranks=ranks, environment=environment if place.device == "cpu" else None
    )


def _compared(
    case: Case,
    place: Place,
    tracer: Tracer,
    planted: bool,
    *,
    hardware: Hardware | None = None,
    rates: Rates | None = None,
) -> Facts:
    """Plan a case and run it; a planted fault plans another micro-batch than runs."""
    ranks = 1 if case.strategy == "single" else min(place.ranks, 2 if place.device == "cpu" else 8)
    hardware = hardware or _hardware(place, ranks)
    size = case.micro_batch_size
    asked = PlanRequest(
        work=_work(place),
        hardware=hardware,
        precision=Decision(value=case.precision, reason="a case of the self-test"),
        strategy=case.strategy,
        sharding="full_shard" if case.strategy == "fsdp" else None,
        cpu_offload=False,
        recompute=case.recompute,
        micro_batch_size=4 * size if planted else size,
        global_batch_size=(4 if planted else 1) * size * ranks,
    )
    answer = planning.make_plan(
        asked, tracer.records, rates=rates or usual_rates(hardware.card.kind)
    )
    best = answer.chosen.value
    candidate = replace(best.candidate, micro_batch_size=size, accumulation=1)
    ran = run_real_steps(asked.work, candidate, ranks=ranks, device=place.device, steps=_STEPS)
    reserved = [one.reserved_bytes for one in ran if one.reserved_bytes is not None]
    slowest = [max(times) for times in zip(*(one.step_s for one in ran), strict=True)]
    return {
        "name": str(case),
        "planned_bytes": best.memory.tensor_bytes,
        "measured_bytes": max(one.peak_bytes for one in ran),
        "planned_reserved_bytes": best.memory.reserved_bytes if reserved else None,
        "measured_reserved_bytes": max(reserved, default=None),
        "planned_s": None if best.time is None else best.time.step_s,
        "measured_s": statistics.median(slowest),
    }


def judge_plan_memory(facts: Facts) -> Outcome:
    """Planned tensor memory and reserved memory are near what real steps take."""
    cases = facts["cases"]
    if not cases:
        return Outcome(confirmed=False, says="no case ran")
    off = {one["name"]: _off(one["planned_bytes"], one["measured_bytes"]) for one in cases}
    reserved = {
        one["name"]: _off(one["planned_reserved_bytes"], one["measured_reserved_bytes"])
        for one in cases
        if one["measured_reserved_bytes"]
    }
    good = max(map(abs, off.values())) <= MEMORY_BAND
    good = good and max(map(abs, reserved.values()), default=0.0) <= _RESERVED_BAND
    worst = max(off, key=lambda name: abs(off[name]))
    says = f"{len(cases)} cases: planned tensor memory differs from measured by at most {100 * abs(off[worst]):.2f} % ({worst})"
    if reserved:
        at = max(reserved, key=lambda name: abs(reserved[name]))
        says += f", reserved memory by {100 * reserved[at]:+.1f} % ({at})"
    return Outcome(confirmed=good, says=says, figures=off)


def judge_plan_time(facts: Facts) -> Outcome:
    """Planned step times are near what real steps take."""
    off = {one["name"]: _off(one["planned_s"], one["measured_s"]) for one in facts["cases"]}
    if not off:
        return Outcome(confirmed=False, says="no case ran")
    worst = max(off, key=lambda name: abs(off[name]))
    return Outcome(
        confirmed=abs(off[worst]) <= TIME_BAND,
        says=f"{len(off)} cases: planned step time differs from measured by at most {100 * off[worst]:+.0f} % ({worst})",
        figures=off,
    )


def _off(planned: float | None, measured: float | None) -> float:
    """Return the relative error of a forecast; infinite if there is none."""
    if planned is None or not measured:
        return float("inf")
    return planned / measured - 1


CHECKS = (
    Check(
        id="plan-memory",
        question="is planned memory what real steps take?",
        fault="four times the micro-batch is planned",
        needs=(),
        seconds=240,
        measure=_plan_memory,
        judge=judge_plan_memory,
    ),
    Check(
        id="plan-time",
        question="is the planned step time what real steps take?",
        fault="four times the micro-batch is planned",
        needs=("gpu",),  # on a busy CPU, times vary too much
        seconds=90,
        measure=_plan_time,
        judge=judge_plan_time,
    ),
)
