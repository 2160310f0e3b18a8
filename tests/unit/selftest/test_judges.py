"""Each check of trainings, saves and plans confirms good facts, and can fail: bad facts are refuted."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from torchmuster.selftest.check import Check, Facts
from torchmuster.selftest.checks import planning, saving, training
from torchmuster.units import format_bytes

_CHECKS = {one.id: one for one in (*training.CHECKS, *saving.CHECKS, *planning.CHECKS)}
_CASE = {
    "name": "ddp fp32",
    "planned_bytes": 1000,
    "measured_bytes": 1001,
    "planned_reserved_bytes": 2000,
    "measured_reserved_bytes": 2010,
    "planned_s": 0.1,
    "measured_s": 0.11,
}
_SKIPPED = {"applied": False, "same": True, "applied_later": True, "moved_later": True}
_SAVED = {"sync_s": 1.0, "stall_s": 0.01, "same": True, "size_bytes": 10}
_OK = {"name": "resume", "difference": None, "finding": {"status": "ok", "what": "equal"}}

GOOD: dict[str, Facts] = {
    "strategies": {
        "losses": {"alone": [2.0, 1.0], "ddp": [2.0, 1.0 + 1e-7], "fsdp": [2.0, 1.0]},
        "weights": {"ddp": 1e-5, "fsdp": 0.0},
        "backend": "nccl",
    },
    "precision": {"losses": {"fp32": [2.0] * 5, "bf16": [2.01] * 5, "fp16": [2.0] * 5}},
    "skipped-step": {"ranks": [{"alone": _SKIPPED, "ddp": _SKIPPED}] * 2},
    "host-syncs": {"alone": [], "ddp": []},
    "overhead": {"device": "gpu", "bare": 0.010, "torchmuster": 0.0105},
    "compile": {"eager": [2.0, 1.0], "compiled": [2.0, 1.0001], "seconds": 20.0},
    "save-stall": {"ranks": [{"ddp": _SAVED, "fsdp": _SAVED, "gpus_of_this_rank": 1}] * 2},
    "resume": {"passed": True, "ranks": 2, "results": [_OK]},
    "out-of-memory": {
        "rank": 3,
        "parameters_bytes": 5 * 2**20,
        "what": "rank 3 on a (cuda:3) ran out of memory in the forward, requested 40 GiB",
        "why": f"parameters  {format_bytes(5 * 2**20)}",
        "fix": "a smaller micro-batch",
    },
    "lora": {
        "lora": {"losses": [6.0, 5.0], "base_same": True, "base_bytes": 100, "trained": 5},
        "qlora": {"losses": [6.0, 5.0], "base_same": True, "base_bytes": 30, "trained": 5},
    },
    "plan-memory": {"cases": [_CASE]},
    "plan-time": {"cases": [_CASE]},
}


def _with(*place: Any) -> Callable[[Facts], None]:
    """Return a change of one value; the last word is the value."""

    def change(facts: Any) -> None:
        *way, last, value = place
        for one in way:
            facts = facts[one]
        facts[last] = value

    return change


BAD: list[tuple[str, Callable[[Facts], None]]] = [
    ("strategies", _with("losses", "fsdp", [2.0, 1.001])),
    ("strategies", _with("losses", "ddp", [2.0])),
    ("strategies", _with("losses", "ddp", [2.0, math.nan])),
    ("strategies", _with("weights", "ddp", 0.01)),
    ("strategies", _with("weights", "ddp", math.inf)),
    ("precision", _with("losses", "bf16", [2.2] * 5)),
    ("precision", _with("losses", "fp16", [math.nan] * 5)),
    ("precision", _with("losses", "fp16", [])),
    ("skipped-step", _with("ranks", 1, "ddp", "applied", True)),
    ("skipped-step", _with("ranks", 0, "alone", "same", False)),
    ("skipped-step", _with("ranks", 0, "ddp", "moved_later", False)),
    ("host-syncs", _with("ddp", ["step.py:12"])),
    ("overhead", _with("torchmuster", 0.02)),
    ("compile", _with("compiled", [2.0, 1.1])),
    ("compile", _with("compiled", [2.0])),
    ("save-stall", _with("ranks", 1, "ddp", "stall_s", 0.9)),
    ("save-stall", _with("ranks", 0, "fsdp", "same", False)),
    ("save-stall", _with("ranks", 1, "gpus_of_this_rank", 2)),
    ("save-stall", _with("ranks", 1, "ddp", {"problem": "disk full"})),
    ("resume", _with("passed", False)),
    ("resume", _with("results", [])),
    ("resume", _with("results", 0, "difference", {"kind": "data-order"})),
    ("out-of-memory", _with("what", "not reported: another error")),
    ("out-of-memory", _with("why", "")),
    ("out-of-memory", _with("fix", "")),
    ("lora", _with("lora", "base_same", False)),
    ("lora", _with("qlora", "losses", [5.0, 6.0])),
    ("lora", _with("qlora", "losses", [5.0, math.nan])),
    ("lora", _with("qlora", "base_bytes", 100)),
    ("plan-memory", _with("cases", 0, "planned_bytes", 1200)),
    ("plan-memory", _with("cases", 0, "measured_reserved_bytes", 4000)),
    ("plan-memory", _with("cases", 0, "planned_reserved_bytes", None)),
    ("plan-memory", _with("cases", [])),
    ("plan-time", _with("cases", 0, "measured_s", 0.2)),
    ("plan-time", _with("cases", 0, "planned_s", None)),
    ("plan-time", _with("cases", [])),
]


@pytest.mark.parametrize("check", _CHECKS.values(), ids=list(_CHECKS))
def test_good_facts_are_confirmed(check: Check) -> None:
    found = check.judge(copy.deepcopy(GOOD[check.id]))
    assert found.confirmed
    assert found.says


@pytest.mark.parametrize(("name", "change"), BAD, ids=[name for name, _ in BAD])
def test_bad_facts_are_refuted(name: str, change: Callable[[Facts], None]) -> None:
    facts = copy.deepcopy(GOOD[name])
    change(facts)
    found = _CHECKS[name].judge(facts)
    assert not found.confirmed
    assert found.says


def test_each_check_has_bad_facts() -> None:
    assert {name for name, _ in BAD} == set(_CHECKS)
