"""What the ranks' records come to: who is named, with which words, and that good groups are left alone."""

import random

import pytest
from msgspec.structs import replace

from torchmuster.diagnose import collectives, wrong_values
from torchmuster.diagnose.rank_record import (
    MARK,
    Health,
    Matmul,
    Operation,
    Pair,
    RankRecord,
    Trouble,
    Values,
    line_of,
    records_from,
)
from torchmuster.finding import Finding, Status
from unit.diagnose.made_up import RIGHT, WRONG, rank


def ranks(size: int = 3, **of_rank: object) -> list[RankRecord]:
    """Return healthy ranks; ``r1={...}`` changes rank 1."""
    changes = {int(name[1:]): given for name, given in of_rank.items()}
    return [rank(one, size, **changes.get(one, {})) for one in range(size)]  # type: ignore[arg-type]


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def matmul(gflops: float, values: Values = RIGHT, precision: str = "float32") -> Matmul:
    return Matmul(precision=precision, flops_per_s=gflops * 1e9, values=values)


def pair(peer: int, *, wrong: bool = False, megabytes_per_s: float = 1000) -> Pair:
    return Pair(
        peer=peer,
        values=WRONG if wrong else RIGHT,
        bytes_per_s=megabytes_per_s * 1e6,
    )


def broken_sums(size: int = 3, backend: str = "nccl") -> list[RankRecord]:
    """Return ranks whose sums are wrong, of all and of each pair with rank 1."""
    wrong = (Operation(name="all-reduce", values=WRONG),)
    records = []
    for record in ranks(size):
        pairs = []
        for own in record.pairs:
            bad = 1 in (own.peer, record.rank)
            pairs.append(replace(own, sums=WRONG if bad else RIGHT))
        records.append(replace(record, backend=backend, operations=wrong, pairs=tuple(pairs)))
    return records


# ---- reading


def test_the_last_record_of_each_rank_counts_and_other_lines_are_passed_over() -> None:
    early = line_of(rank(1, stage="devices", ended=False, operations=(), pairs=()))
    lines = ["torch says hello", early, f"[1]: {line_of(rank(1))}", line_of(rank(0)), "{}"]
    assert records_from(lines) == [rank(0), rank(1)]


def test_a_record_that_is_nested_too_deeply_is_passed_over() -> None:
    nested = '{"x":' + "[" * 100_000
    assert records_from([line_of(rank(0)), f"{MARK}{nested}"]) == [rank(0)]


# ---- healthy groups


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_nothing_is_said_of_a_healthy_group(size: int) -> None:
    assert collectives.judge_collectives(ranks(size)) == []
    assert wrong_values.second_try(ranks(size)) == {}


def test_a_busy_machine_is_no_reason_for_an_alarm() -> None:
    # Speeds as they scatter beside heavy neighbours, after the best of several tries was taken.
    chance = random.Random(1)
    for _ in range(300):
        group = [
            rank(
                number,
                4,
                matmuls=(matmul(150 * chance.uniform(0.7, 1)),),
                pairs=tuple(
                    pair(peer, megabytes_per_s=2000 * chance.uniform(0.07, 1))
                    for peer in range(4)
                    if peer != number
                ),
            )
            for number in range(4)
        ]
        assert collectives.judge_collectives(group) == []


# ---- wrong values


def test_a_device_that_computes_wrongly_is_named_with_its_place() -> None:
    finding = only(
        collectives.judge_collectives(
            ranks(
                r2={
                    "matmuls": (matmul(150, WRONG),),
                    "device": "cuda:1",
                    "device_name": "NVIDIA A100",
                    "device_uuid": "3bd0-77",
                }
            )
        )
    )
    assert (finding.name, finding.status) == ("wrong-device", Status.FAILURE)
    assert finding.what.startswith("node3, GPU 1 (rank 2) ")
    assert "-i GPU-3bd0-77" in finding.fix


def test_a_rank_that_spoils_sums_is_named_though_all_see_them_wrong() -> None:
    finding = only(collectives.judge_collectives(broken_sums()))
    assert finding.name == "wrong-values"
    assert finding.what.startswith("node2, CPU (rank 1): ")
    assert "all-reduce" in finding.what
    assert "3 of 3,000" in finding.evidence


def test_a_wrong_value_that_did_not_come_again_is_told_all_the_same() -> None:
    finding = only(
        collectives.judge_collectives(
            ranks(r1={"operations": (Operation(name="all-reduce", values=WRONG),)})
        )
    )
    assert finding.what.startswith("node2, CPU (rank 1): ")


@pytest.mark.parametrize(
    ("seen", "guilty"),
    [
        (set(), []),
        ({(0, 1)}, [(0, 1)]),
        ({(0, 1), (1, 0)}, [(0, 1)]),
        ({(0, 1), (2, 1), (3, 1)}, [(1,)]),
        ({(1, 0), (1, 2), (1, 3)}, [(1,)]),
        ({(1, 1)}, [(1,)]),
        ({(0, 1), (2, 3)}, [(0, 1), (2, 3)]),
        ({(0, 5), (1, 5), (2, 5), (3, 4)}, [(5,), (3, 4)]),
        ({(0, 1), (1, 2), (2, 0)}, [(0, 1, 2)]),  # any of them
    ],
)
def test_the_fewest_that_explain_what_was_seen_are_blamed(
    seen: set[tuple[int, int]], guilty: list[tuple[int, ...]]
) -> None:
    assert wrong_values.blame_ranks(seen) == guilty


# ---- two by two


def broken_p2p() -> list[RankRecord]:
    return ranks(
        r1={"pairs": (pair(0, wrong=True), pair(2, wrong=True))},
    )


def test_wrong_values_between_two_ask_for_a_second_try() -> None:
    assert wrong_values.second_try(broken_p2p()) == wrong_values.SECOND_TRY
    finding = only(collectives.judge_collectives(broken_p2p()))
    assert finding.name == "wrong-values"
    assert "node2, CPU (rank 1)" in finding.what


def test_a_second_try_that_is_right_gives_the_cure() -> None:
    finding = only(collectives.judge_collectives(broken_p2p(), ranks()))
    assert finding.status is Status.FAILURE
    assert finding.fix.splitlines()[0] == "export NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0"
    assert "NCCL_P2P_DISABLE=1" in finding.why


def test_wrong_sums_of_nccl_are_tried_again_without_nvlink_sharp() -> None:
    assert wrong_values.second_try(broken_sums())["NCCL_NVLS_ENABLE"] == "0"
    assert wrong_values.second_try(broken_sums(backend="gloo")) == {}
    finding = only(collectives.judge_collectives(broken_sums(), ranks()))
    assert (finding.name, finding.status) == ("wrong-values", Status.FAILURE)
    assert finding.fix.splitlines()[0] == "export NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0"
    finding = only(collectives.judge_collectives(broken_sums(), broken_sums()))
    assert "export" not in finding.fix
    assert "NCCL_NVLS_ENABLE=0" in finding.why


# ---- hangs and errors


def test_a_hang_names_the_rank_that_all_others_wait_for() -> None:
    waiting = {"trouble": Trouble(stage="collectives", problem="hangs", ranks=(2,))}
    finding = only(collectives.judge_collectives(ranks(r0=waiting, r1=waiting, r2=waiting)))
    assert (finding.name, finding.status) == ("collective-hangs", Status.FAILURE)
    assert finding.what.startswith("node3, CPU (rank 2) ")
    assert "on node3: " in finding.fix
    assert finding.fix.splitlines()[1].startswith("ps -eo pid,stat")


def test_a_rank_that_fell_silent_is_named_and_the_errors_of_the_others_are_its_consequence() -> (
    None
):
    silent = {"stage": "pairs", "ended": False}
    error = {"trouble": Trouble(stage="pairs", problem="error", text="RuntimeError: closed")}
    finding = only(collectives.judge_collectives(ranks(2, r0=error, r1=silent)))
    assert finding.name == "collective-hangs"
    assert finding.what.startswith("node2, CPU (rank 1) ")


# ---- slowness


def test_a_slow_machine_is_named_with_its_share() -> None:
    finding = only(collectives.judge_collectives(ranks(4, r3={"matmuls": (matmul(30),)})))
    assert (finding.name, finding.status) == ("slow-device", Status.WARNING)
    assert finding.what.startswith("node4, CPU (rank 3) ")
    assert "20%" in finding.what


def test_devices_of_other_models_are_not_compared() -> None:
    old = {"device_name": "Old CPU", "matmuls": (matmul(9),)}
    assert collectives.judge_collectives(ranks(2, r1=old)) == []


def test_one_slow_device_of_a_machine_is_named_itself() -> None:
    here = {"host": "node1", "device_name": "A100"}
    group = ranks(
        3,
        r0={**here, "device": "cuda:0"},
        r1={**here, "device": "cuda:1", "matmuls": (matmul(60),), "device_uuid": "u"},
        r2={**here, "device": "cuda:2"},
    )
    finding = only(collectives.judge_collectives(group))
    assert finding.name == "slow-device"
    assert finding.what.startswith("node1, GPU 1 (rank 1) ")
    assert "40%" in finding.what


def test_heat_under_load_is_a_warning_and_a_power_limit_a_note() -> None:
    hot = Health(temperature_c=91, throttled_by=("heat (hardware)",))
    finding = only(collectives.judge_collectives(ranks(r1={"health": hot})))
    assert (finding.name, finding.status) == ("gpu-hot", Status.WARNING)
    assert finding.what.startswith("node2, CPU (rank 1) ")
    assert "heat (hardware)" in finding.what
    capped = Health(throttled_by=("power limit",))
    assert only(collectives.judge_collectives(ranks(r1={"health": capped}))).status is Status.NOTE


def test_slow_pairs_of_one_rank_are_one_finding() -> None:
    slow = {"pairs": tuple(pair(peer, megabytes_per_s=11) for peer in (0, 1, 2))}
    others = {
        f"r{one}": {
            "pairs": tuple(
                pair(p, megabytes_per_s=11 if p == 3 else 1000) for p in range(4) if p != one
            )
        }
        for one in range(3)
    }
    finding = only(collectives.judge_collectives(ranks(4, r3=slow, **others)))
    assert finding.name == "slow-pair"
    assert "node4, CPU (rank 3)" in finding.what
    assert "11 MB/s" in finding.what


# ---- the library
