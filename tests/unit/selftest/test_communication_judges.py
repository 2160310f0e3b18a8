"""What the checks of communication and of measurements conclude from their facts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from torchmuster.selftest.check import Facts
from torchmuster.selftest.checks import communication, measuring
from torchmuster.selftest.checks.communication import (
    count_smoke_ranks,
    named_rank,
    ras_ranks,
    transports_in,
)

JUDGES = {one.id: one.judge for one in (*communication.CHECKS, *measuring.CHECKS)}
OPERATIONS = ("all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all")


def exact(ranks: int = 2) -> list[Facts]:
    values = {name: {"compared": 100, "wrong": 0, "seconds": 0.1} for name in OPERATIONS}
    return [{"operations": copy.deepcopy(values), "backend": "nccl"} for _ in range(ranks)]


def recorded() -> Facts:
    return {
        "entries": 20,
        "missing": [],
        "collectives": 20,
        "last": 20,
        "finished": 20,
        "with_shapes": 19,
    }


WAITS = {"last": 12, "waits_in": ["allreduce", 12]}
GOOD: dict[str, Facts] = {
    "collectives": {"ranks": exact()},
    "p2p-off": {"ranks": exact(), "transports": {"SHM": 4}},
    "hang": {
        "sleeps": 2,
        "ranks": 3,
        "cause": "rank-idle",
        "named": 2,
        "reported_after_s": 14.0,
        "progress": {"0": WAITS, "1": WAITS, "2": {"last": 11, "waits_in": None}},
    },
    "flight-recorder": {
        "backend": "nccl",
        "nccl": [2, 27, 3],
        "ras": 2,
        "ranks": [recorded(), recorded()],
        "findings": [],
    },
    "sigusr1": {"exit_code": 75, "checkpoints": [9], "steps": 200, "replaced": ["SIGUSR1"]},
    "hosts": {
        "hosts": 2,
        "missing": 0,
        "failures": [],
        "ranks_on": 2,
        "ranks": 4,
        "compared": 1000,
        "wrong": 0,
        "smoke_ranks": 4,
        "check_s": 20.0,
    },
    "bench": {
        "device": "gpu",
        "rates": {
            "cpu": {"float32": 1e11},
            "accelerator": {"float32": 1.5e13, "tf32": 8e13, "bfloat16": 2e14},
        },
        "threads": 8,
        "shares": {"float32": 0.77, "tf32": 0.51, "bfloat16": 0.64},
        "errors": {"float32": 3e-7, "tf32": 3e-4, "bfloat16": 2e-3},
        "failures": [],
    },
    "profile": {
        "device": "cpu",
        "causes": ["starved-loader", "tiny-batch"],
        "step_s": 0.05,
        "shares_s": {"data": 0.04, "compute": 0.009, "idle": 0.0},
    },
    "prove": {
        "ranks": 2,
        "steps": 4,
        "runs": 2,
        "outcomes": {"determinism": "pass"},
        "differences": [],
    },
}

# The facts that are good without a GPU, too.
ALSO_GOOD: list[tuple[str, Facts]] = [
    ("flight-recorder", {"backend": "gloo", "nccl": None, "ras": None}),
    ("flight-recorder", {"nccl": [2, 21, 5], "ras": None}),
    (
        "bench",
        {"device": "cpu", "rates": {"cpu": {"float32": 1e11}, "accelerator": {}}, "shares": {}},
    ),
    ("bench", {"shares": {}}),
    (
        "profile",
        {
            "device": "gpu",
            "causes": ["host-reads"],
            "shares_s": {"reads": 0.05, "compute": 0.02},
        },
    ),
]

# Changes of good facts, each of which must be found. A function changes the facts in place.
BAD: list[tuple[str, Facts | Callable[[Any], object]]] = [
    ("collectives", lambda facts: facts["ranks"][1]["operations"]["broadcast"].update(wrong=1)),
    ("collectives", lambda facts: facts["ranks"][1]["operations"].pop("all-to-all")),
    ("collectives", lambda facts: facts["ranks"][0]["operations"]["all-gather"].update(compared=0)),
    ("p2p-off", {"transports": {"P2P": 2, "SHM": 2}}),
    ("p2p-off", {"transports": {}}),
    ("p2p-off", lambda facts: facts["ranks"][0]["operations"]["all-reduce"].update(wrong=3)),
    ("hang", {"named": 0}),
    ("hang", {"named": None}),
    ("hang", {"cause": "collective-does-not-end"}),
    ("hang", {"reported_after_s": None}),
    ("hang", {"reported_after_s": 200.0}),
    ("hang", {"progress": {}}),
    ("hang", lambda facts: facts["progress"].pop("1")),
    (
        "hang",
        lambda facts: facts["progress"].update({"0": {"last": 11, "waits_in": ["broadcast", 12]}}),
    ),
    ("hang", lambda facts: facts["progress"].update({"2": {"last": 5, "waits_in": None}})),
    ("flight-recorder", lambda facts: facts["ranks"][0].update(missing=["collective_seq_id"])),
    ("flight-recorder", lambda facts: facts["ranks"][1].update(collectives=19)),
    ("flight-recorder", lambda facts: facts["ranks"][1].update(last=21)),
    ("flight-recorder", lambda facts: facts["ranks"][1].update(finished=19)),
    (
        "flight-recorder",
        lambda facts: [one.update(collectives=0, last=0, finished=0) for one in facts["ranks"]],
    ),
    ("flight-recorder", lambda facts: [one.update(with_shapes=0) for one in facts["ranks"]]),
    ("flight-recorder", {"findings": ["rank-behind"]}),
    ("flight-recorder", {"ras": 1}),
    ("flight-recorder", {"ras": None}),
    ("sigusr1", {"exit_code": 0, "checkpoints": [200]}),
    ("sigusr1", {"checkpoints": []}),
    ("sigusr1", {"checkpoints": [200]}),
    ("sigusr1", {"checkpoints": [9, 40]}),
    ("hosts", {"hosts": 3, "missing": 1}),
    ("hosts", {"failures": ["host-unreachable"]}),
    ("hosts", {"wrong": 1}),
    ("hosts", {"compared": 0}),
    ("hosts", {"ranks_on": 1}),
    ("hosts", {"smoke_ranks": 3}),
    ("bench", {"failures": ["matmul-wrong-values"]}),
    ("bench", lambda facts: facts["shares"].update(bfloat16=640.0)),
    ("bench", lambda facts: facts["shares"].update(float32=0.01)),
    ("bench", lambda facts: facts["errors"].update(tf32=3e-7)),
    ("bench", lambda facts: facts["errors"].update(tf32=0.1)),
    ("bench", lambda facts: facts["rates"]["accelerator"].update(bfloat16=1e13)),
    ("bench", lambda facts: facts["rates"]["accelerator"].update(tf32=1.5e13)),
    ("bench", lambda facts: facts["rates"]["accelerator"].update(float32=1e10)),
    ("bench", lambda facts: facts["rates"]["cpu"].update(float32=1e14)),
    ("bench", lambda facts: facts["rates"]["cpu"].clear()),
    ("profile", {"causes": []}),
    ("profile", {"causes": ["tiny-batch", "starved-loader"]}),
    ("profile", {"shares_s": {"data": 0.01, "compute": 0.01}}),
    ("profile", {"shares_s": {"data": 0.08, "compute": 0.02}}),
    ("profile", {"shares_s": {"data": 0.06, "compute": -0.01}}),
    ("profile", {"shares_s": {"data": 0.001, "compute": 0.049}}),
    ("profile", {"shares_s": {}}),
    ("prove", {"outcomes": {"determinism": "fail"}}),
    ("prove", {"outcomes": {}}),
    ("prove", {"steps": 0}),
    ("prove", {"runs": 1}),
]


def test_every_check_has_good_and_bad_facts() -> None:
    assert set(GOOD) == set(JUDGES) == {name for name, _ in BAD}


@pytest.mark.parametrize("name", JUDGES)
def test_good_facts_are_confirmed(name: str) -> None:
    outcome = JUDGES[name](GOOD[name])
    assert outcome.confirmed, outcome
    assert outcome.says
    assert "\n" not in outcome.says


@pytest.mark.parametrize(("name", "change"), ALSO_GOOD)
def test_facts_of_other_hardware_are_confirmed(name: str, change: Facts) -> None:
    outcome = JUDGES[name]({**GOOD[name], **change})
    assert outcome.confirmed, outcome


@pytest.mark.parametrize(("name", "change"), BAD)
def test_bad_facts_are_refuted(name: str, change: Facts | Callable[[Any], object]) -> None:
    facts = copy.deepcopy(GOOD[name])
    if callable(change):
        change(facts)
    else:
        facts |= change
    outcome = JUDGES[name](facts)
    assert not outcome.confirmed, outcome
    assert outcome.says


def test_transports_are_counted_in_the_log_of_nccl() -> None:
    log = (
        "vm:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "vm:7:9 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct\n"
        "vm:7:9 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0\n"
        "vm:7:9 [0] NCCL INFO Channel 02 : 0[0] -> 1[1] via SHM/direct/direct\n"
    )
    assert transports_in(log) == {"P2P": 1, "SHM": 2, "NET": 1}
    assert transports_in("NCCL INFO NCCL_P2P_DISABLE set by environment to 1\n") == {}


def test_ranks_are_counted_in_the_answer_of_ras() -> None:
    answer = (
        "NCCL version 2.24.3 compiled with CUDA 12.6\nCUDA runtime version 12060, driver version 12060\n\n"
        "Job summary\n===========\n\n"
        "  Nodes  Processes         GPUs  Processes     GPUs\n"
        "(total)   per node  per process    (total)  (total)\n"
        "      4          8            1         32       32\n\n"
        "Communicators... (0.00s)\n=============\n"
    )
    assert ras_ranks(answer) == 32
    assert ras_ranks("") is None
    assert ras_ranks("Job summary\n===========\n") is None


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("rank 3 on vm keeps the others waiting: in time.sleep", 3),
        ("rank 12 (GPU 4) keeps the others waiting", 12),
        ("all ranks have been in all_reduce for 1 min", None),
    ],
)
def test_the_named_rank_is_read(text: str, rank: int | None) -> None:
    assert named_rank(text) == rank


def test_ranks_of_a_smoke_test_count_after_their_barrier() -> None:
    output = (
        "[rank 0] gathered=[0, 1]\n[rank 0] barrier OK; shutting down\n[rank 1] gathered=[0, 1]\n"
    )
    assert count_smoke_ranks(output) == 1


PRINTED = {
    "record": {
        "series": [
            {"samples": [1e9, 3e9, 2e9], "labels": {"on": "cpu", "type": "float32"}},
            {"samples": [1e9], "labels": {"on": "cpu", "type": "float32"}},
            {"samples": [4e14], "labels": {"on": "accelerator", "type": "bfloat16"}},
        ],
        "facts": {
            "device": "NVIDIA H100 80GB HBM3",
            "threads": 4,
            "largest_error": {"float32": 1e-7},
        },
    },
    "findings": [
        {"name": "matmul-above-peak", "status": "failure"},
        {"name": "matmul-noisy", "status": "warning"},
    ],
}


def test_the_best_rates_of_a_bench_and_their_shares_are_facts() -> None:
    found = measuring.bench_facts(PRINTED, planted=False)
    assert found["rates"] == {"cpu": {"float32": 2e9}, "accelerator": {"bfloat16": 4e14}}
    assert 0.3 < found["shares"]["bfloat16"] < 0.5
    assert found["failures"] == ["matmul-above-peak"]
    planted = measuring.bench_facts(PRINTED, planted=True)
    assert planted["rates"]["cpu"] == {"float32": 2e12}
    assert planted["shares"]["bfloat16"] > 100
