"""Checks of measurements: benches, profiles and proofs of small scripts."""

import json
import statistics
from collections.abc import Mapping
from typing import Any

from torchmuster.errors import ExitCode
from torchmuster.plan.hardware import catalogue
from torchmuster.selftest.check import Check, Facts, Outcome, Place
from torchmuster.selftest.checks.communication import ranks_flags

_SIZES = {"cpu": ("256", "512"), "gpu": ("1024", "2048")}
_CPU_RATES = 1e8, 3e11  # FLOP/s of one thread, float32
_SHARES = 0.05, 1.02  # of the vendor's peak
_TF32_ERRORS = 1e-5, 5e-3
_WRONG_FIGURES = 1000


def _bench(place: Place, planted: bool) -> Facts:
    folder = place.scratch()
    flags = ("--device", place.device, *(("--num-gpus", "1") if place.device == "gpu" else ()))
    words = ("matmul", "--quick", "--sizes", *_SIZES[place.device], *flags)
    printed = place.muster(
        "bench", *words, "--json", "--out", "matmul", folder=folder, accepted=(0, 1)
    )
    return {"device": place.device, **bench_facts(json.loads(printed), planted=planted)}


def bench_facts(printed: Mapping[str, Any], *, planted: bool) -> Facts:
    """Return the facts of a record of ``muster bench matmul``: best rates, shares of the peak, errors."""
    record = printed["record"]
    factor = _WRONG_FIGURES if planted else 1
    rates: dict[str, dict[str, float]] = {"cpu": {}, "accelerator": {}}
    for series in record["series"]:
        labels = series["labels"]
        best = rates[labels["on"]]
        rate = statistics.median(series["samples"]) * factor
        best[labels["type"]] = max(rate, best.get(labels["type"], 0.0))
    known = catalogue.find_gpu(record["facts"]["device"]) if rates["accelerator"] else None
    peaks = {} if known is None else known.card.flops
    return {
        "rates": rates,
        "threads": record["facts"]["threads"],
        "shares": {
            name: rate / peaks[name]
            for name, rate in rates["accelerator"].items()
            if peaks.get(name)
        },
        "errors": record["facts"]["largest_error"],
        "failures": [one["name"] for one in printed["findings"] if one["status"] == "failure"],
    }


def judge_bench(facts: Facts) -> Outcome:
    """Products are right; rates, shares of the peak and errors are plausible."""
    wrong = [name for name in facts["failures"] if name == "matmul-wrong-values"]
    cpu, gpu = facts["rates"]["cpu"], facts["rates"]["accelerator"]
    per_thread = cpu.get("float32", 0.0) / max(facts["threads"], 1)
    if not _CPU_RATES[0] < per_thread < _CPU_RATES[1]:
        wrong.append(f"{per_thread:.2g} FLOP/s for a thread of the CPU")
    if facts["device"] == "gpu":
        wrong += _wrong_on_gpu(facts, gpu)
    shown = [f"{name} {rate / 1e9:,.4g} GFLOP/s" for name, rate in (gpu or cpu).items()]
    shown += [
        f"{100 * share:.0f} % of the peak in {name}" for name, share in facts["shares"].items()
    ]
    figures = {f"{name}_flops": rate for name, rate in (gpu or cpu).items()}
    figures |= {f"{name}_share": share for name, share in facts["shares"].items()}
    figures |= {f"{name}_error": error for name, error in facts["errors"].items()}
    return Outcome(
        confirmed=not wrong,
        says=f"implausible: {'; '.join(wrong)}" if wrong else ", ".join(shown),
        figures=figures,
    )


def _wrong_on_gpu(facts: Facts, rates: Mapping[str, float]) -> list[str]:
    wrong = [
        f"{share:.3g} of the peak in {name}"
        for name, share in facts["shares"].items()
        if not _SHARES[0] < share < _SHARES[1]
    ]
    plain = rates.get("float32", 0.0)
    if not plain > max(facts["rates"]["cpu"].values(), default=0.0):
        wrong.append("the GPU is slower than the CPU in float32")
    if "tf32" in rates:  # then the GPU has tensor cores
        slower = [name for name in ("tf32", "bfloat16") if rates.get(name, 0.0) <= plain]
        wrong += [f"{name} is not faster than float32" for name in slower]
        error = facts["errors"]["tf32"]
        if not _TF32_ERRORS[0] < error < _TF32_ERRORS[1]:
            wrong.append(f"error of tf32: {error:.2g}")
    return wrong


_PROFILED_SCRIPT = """\
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

on_gpu, slow = sys.argv[1] == "gpu", sys.argv[2] == "slow"
device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
torch.set_num_threads(1)

class Rows(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, number):
        if slow and not on_gpu:
            time.sleep(0.02)
        return torch.full((64,), float(number))

layers = [torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 1)]
model = torch.nn.Sequential(*layers)
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
for batch in DataLoader(Rows(), batch_size=8):
    rows = batch.to(device)
    loss = model(rows).square().mean()
    if slow and on_gpu:
        for _ in range(200):
            (loss * 2).item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_CAUSES = {"cpu": ("starved-loader", "data"), "gpu": ("host-reads", "reads")}
_STEP_AND_SHARES = {"cpu": (0.7, 1.3), "gpu": (0.5, 10.0)}  # on GPUs, of steps with the profiler


def _profile(place: Place, planted: bool) -> Facts:
    folder = place.scratch()
    (folder / "profiled.py").write_text(_PROFILED_SCRIPT, encoding="utf-8")
    printed = json.loads(
        place.muster(
            "profile", *ranks_flags(place, 1), "--steps", "10:12", "--no-trials", "--json",
            "profiled.py", place.device, "fast" if planted else "slow",
            folder=folder,
        )
    )  # fmt: skip
    return {
        "device": place.device,
        "causes": [one["cause"] for one in printed["advice"]],
        "step_s": printed["step_s"],
        "shares_s": printed["ranks"][0]["shares_s"],
    }


def judge_profile(facts: Facts) -> Outcome:
    """The profile names the problem of the script first, and the shares add up to the step."""
    cause, share = _CAUSES[facts["device"]]
    shares: Mapping[str, float] = facts["shares_s"]
    whole_s, step_s = sum(shares.values()), facts["step_s"]
    ratio = whole_s / step_s if step_s else 0.0
    low, high = _STEP_AND_SHARES[facts["device"]]
    parts = {name: one / whole_s if whole_s else 0.0 for name, one in shares.items()}
    named = facts["causes"][:1] == [cause]
    largest = max(parts, key=lambda name: parts[name], default="none")
    good = named and low < ratio < high and min(parts.values(), default=-1.0) >= 0.0
    return Outcome(
        confirmed=good and parts.get(share, 0.0) > 0.2,
        says=f"named causes: {', '.join(facts['causes']) or 'none'} (expected: {cause}); the largest share is {largest} with "
        f"{100 * parts.get(largest, 0.0):.0f} %; the parts sum to {ratio:.2f} of the step",
        figures={
            "step_s": step_s,
            "shares_to_step": ratio,
            f"{share}_share": parts.get(share, 0.0),
        },
    )


_PROVED_STEPS = 4
_PROVED_SCRIPT = """\
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device = torch.device("cpu")
if sys.argv[1] == "gpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    device = torch.accelerator.current_accelerator()
dist.init_process_group(dist.get_default_backend_for_device(device))
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
if sys.argv[2] == "noisy":
    rows += os.urandom(1)[0] / 256
for step in range(8):
    loss = model(rows[step * 8 : step * 8 + 8].to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def _prove(place: Place, planted: bool) -> Facts:
    folder = place.scratch()
    (folder / "proved.py").write_text(_PROVED_SCRIPT, encoding="utf-8")
    ranks = min(place.ranks, 2)
    printed = json.loads(
        place.muster(
            "prove", "proved.py", "--only", "determinism", "--steps", str(_PROVED_STEPS),
            "--ranks", str(ranks), "--device", place.device, "--json",
            "--", place.device, "noisy" if planted else "equal",
            folder=folder,
            accepted=(ExitCode.GOOD, ExitCode.FAILED),
        )
    )  # fmt: skip
    return {
        "ranks": printed["ranks"],
        "steps": printed["steps"],
        "runs": printed["runs"],
        "outcomes": {one["name"]: one["outcome"] for one in printed["results"]},
        "differences": [one["difference"] for one in printed["results"] if one["difference"]],
    }


def judge_prove(facts: Facts) -> Outcome:
    """Two runs of a script without random inputs are equal in every step."""
    outcomes: Mapping[str, str] = facts["outcomes"]
    shown = ", ".join(f"{name}: {outcome}" for name, outcome in outcomes.items()) or "no result"
    return Outcome(
        confirmed=outcomes == {"determinism": "pass"}
        and facts["steps"] == _PROVED_STEPS
        and facts["runs"] >= 2,
        says=f"{shown} ({facts['runs']} runs of {facts['steps']} steps on {facts['ranks']} ranks)",
        figures={name: facts[name] for name in ("ranks", "runs", "steps")},
    )


CHECKS = (
    Check(
        id="bench",
        question="does muster bench give right products and plausible rates?",
        fault="figures are multiplied by 1000",
        needs=(),
        seconds=25,
        measure=_bench,
        judge=judge_bench,
    ),
    Check(
        id="profile",
        question="does muster profile name why a script is slow: a slow loader (CPU), reads to the host (GPU)?",
        fault="the script does not have this problem",
        needs=(),
        seconds=30,
        measure=_profile,
        judge=judge_profile,
    ),
    Check(
        id="prove",
        question="does muster prove find that a deterministic script gives equal runs?",
        fault="the script adds noise from os.urandom to its inputs",
        needs=(),
        seconds=40,
        measure=_prove,
        judge=judge_prove,
    ),
)
