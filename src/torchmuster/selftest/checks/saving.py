"""Checks of checkpoints, of the report of an out-of-memory error, and of adapters."""

import importlib.util
import json
import math

from torchmuster.selftest.check import Check, Facts, NotHere, Outcome, Place
from torchmuster.units import format_bytes

_PROGRAM = "saving"
_MOST_STALL = 0.3  # of a synchronous save
_SETTINGS = """\
experiment_name: selftest
model:
  build: torchmuster.bench.probes.small_gpt:make_small_gpt
  loss: language_model
data:
  dataset: {rows}
train:
  steps: 12
  global_batch_size: 4
  micro_batch_size: 2
checkpoint:
  every: 3
"""


def _save_stall(place: Place, planted: bool) -> Facts:
    folder = str(place.scratch())
    ranks = min(place.ranks, 2) if place.device == "cpu" else place.ranks
    return {
        "ranks": place.on_ranks(_PROGRAM, "save-stall", planted=planted, ranks=ranks, folder=folder)
    }


def judge_save_stall(facts: Facts) -> Outcome:
    """Background saves have the right bytes, delay training little, and use one GPU per rank."""
    wrong, shares = [], {}
    for rank, found in enumerate(facts["ranks"]):
        for name in ("ddp", "fsdp"):
            one = found[name]
            if "problem" in one:
                wrong.append(f"{name}: {one['problem']}")
                continue
            shares[f"{name} rank {rank}"] = one["stall_s"] / one["sync_s"]
            if not one["same"]:
                wrong.append(f"{name}: a checkpoint on rank {rank} has other weights")
        if (found["gpus_of_this_rank"] or 1) > 1:
            wrong.append(f"rank {rank} uses {found['gpus_of_this_rank']} GPUs")
    worst = max(shares.values(), default=math.inf)
    if worst > _MOST_STALL:
        wrong.append(f"training waits {100 * worst:.0f} % of the time of a synchronous save")
    says = f"background saves are exact; training waits at most {100 * worst:.1f} % of the time of a synchronous save"
    return Outcome(
        confirmed=not wrong,
        says="; ".join(wrong) if wrong else says,
        figures={name.replace(" ", "_"): share for name, share in shares.items()},
    )


def _resume(place: Place, planted: bool) -> Facts:
    folder = place.scratch()
    rows = "torchmuster.selftest.probes.training_data:make_changing_rows"
    if not planted:
        rows = "torchmuster.bench.probes.small_gpt:make_learnable_rows"
    (folder / "config.yaml").write_text(_SETTINGS.format(rows=rows), encoding="utf-8")
    words = ["prove", "config.yaml", "--only", "resume", "--stops", "rank-killed", "--steps", "12"]
    ranks = "2" if place.ranks >= 2 else "1"
    words += ["--ranks", ranks, "--device", place.device, "--json"]
    proof: Facts = json.loads(place.muster(*words, folder=folder, accepted=(0, 1)))
    return proof


def judge_resume(facts: Facts) -> Outcome:
    """A killed and resumed training has the same inputs, losses, gradients, weights and states, bit by bit."""
    results = facts["results"]
    failed = [one for one in results if one["difference"] is not None]
    passed = [one for one in results if one["finding"]["status"] == "ok"]
    good = facts["passed"] and bool(passed) and not failed
    shown = passed if good else (failed or results)
    return Outcome(
        confirmed=good,
        says=shown[0]["finding"]["what"] if shown else "nothing was proved",
        figures={"passed": len(passed), "failed": len(failed), "ranks": facts["ranks"]},
    )


def _out_of_memory(place: Place, planted: bool) -> Facts:
    return place.on_ranks(_PROGRAM, "out-of-memory", planted=planted, ranks=1)[0]


def judge_out_of_memory(facts: Facts) -> Outcome:
    """The report names the rank, shows memory by category, and has a fix."""
    size = format_bytes(facts["parameters_bytes"])
    missing = [
        name
        for name, there in (
            ("the rank", f"rank {facts['rank']} " in facts["what"]),
            ("the requested size", "requested" in facts["what"]),
            ("the size of the parameters", size in facts["why"]),
            ("a fix", bool(facts["fix"])),
        )
        if not there
    ]
    return Outcome(
        confirmed=not missing,
        says=f"missing in the report: {', '.join(missing)} ({facts['what']})"
        if missing
        else "the report names rank, phase and requested size, with memory by category and a fix",
        figures={"missing": len(missing)},
    )


def _lora(place: Place, planted: bool) -> Facts:
    for name in ("transformers", "peft"):
        if importlib.util.find_spec(name) is None:
            raise NotHere(f"{name} is not installed: pip install 'torchmuster[lora]'")
    four_bit = importlib.util.find_spec("bitsandbytes") is not None
    return place.on_ranks(
        _PROGRAM,
        "lora",
        planted=planted,
        ranks=1,
        four_bit=four_bit,
        folder=str(place.scratch()),
    )[0]


def judge_lora(facts: Facts) -> Outcome:
    """Adapters learn, their base does not change, and a base of 4 bits is smaller."""
    wrong = []
    for name, one in facts.items():
        losses = one["losses"]
        if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
            wrong.append(f"{name}: the loss does not fall")
        if not one["base_same"]:
            wrong.append(f"{name}: a frozen weight changed")
    if "qlora" in facts and facts["qlora"]["base_bytes"] > 0.6 * facts["lora"]["base_bytes"]:
        wrong.append("the base of 4 bits is not smaller")
    falls = ", ".join(
        f"{name} {one['losses'][0]:.3f} to {one['losses'][-1]:.3f}" for name, one in facts.items()
    )
    return Outcome(
        confirmed=not wrong,
        says="; ".join(wrong) if wrong else f"losses fall ({falls}), frozen weights are unchanged",
        figures={f"{name}_base_bytes": one["base_bytes"] for name, one in facts.items()},
    )


CHECKS = (
    Check(
        id="save-stall",
        question="are background saves exact, and how long does training wait for them?",
        fault="saves are synchronous",
        needs=(),
        seconds=25,
        measure=_save_stall,
        judge=judge_save_stall,
    ),
    Check(
        id="resume",
        question="is a killed and resumed training equal to one that never stopped, bit by bit?",
        fault="the data differ in each process",
        needs=(),
        seconds=60,
        measure=_resume,
        judge=judge_resume,
    ),
    Check(
        id="out-of-memory",
        question="does an out-of-memory error report rank, memory and a fix?",
        fault="the error is another one",
        needs=(),
        seconds=15,
        measure=_out_of_memory,
        judge=judge_out_of_memory,
    ),
    Check(
        id="lora",
        question="do LoRA and QLoRA train, with unchanged base weights?",
        fault="one bit of a frozen weight changes",
        needs=(),
        seconds=30,
        measure=_lora,
        judge=judge_lora,
    ),
)
