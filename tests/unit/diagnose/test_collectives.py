"""What the ranks' records come to: who is named, with which words, and that good groups are left alone."""

import random

import pytest
from msgspec.structs import replace
from syrupy.assertion import SnapshotAssertion

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


# ---- reading


def test_the_last_record_of_each_rank_counts_and_other_lines_are_passed_over() -> None:
    early = line_of(rank(1, stage="devices", ended=False, operations=(), pairs=()))
    lines = ["torch says hello", early, f"[1]: {line_of(rank(1))}", line_of(rank(0)), "{}"]
    assert records_from(lines) == [rank(0), rank(1)]


@pytest.mark.parametrize("cut", [20, 100, 400])
def test_a_line_that_was_cut_short_is_passed_over(cut: int) -> None:
    assert records_from([line_of(rank(0))[:cut]]) == []


def test_a_record_that_is_nested_too_deeply_is_passed_over() -> None:
    nested = '{"x":' + "[" * 100_000
    assert records_from([line_of(rank(0)), f"{MARK}{nested}"]) == [rank(0)]


def test_what_is_not_a_number_survives_being_printed() -> None:
    nan = Values(compared=1, wrong=1, place=0, got=float("nan"), expected=1.0)
    (record,) = records_from([line_of(rank(0, matmuls=(matmul(1, nan),)))])
    assert record.matmuls[0].values.got is None


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


def test_devices_of_other_models_are_not_compared() -> None:
    assert (
        collectives.judge_collectives(
            ranks(2, r1={"device_name": "Old CPU", "matmuls": (matmul(9),)})
        )
        == []
    )


# ---- wrong values


def test_a_device_that_computes_wrongly_is_named_with_its_place(
    snapshot: SnapshotAssertion,
) -> None:
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
    assert finding == snapshot


def test_amd_gpus_are_checked_with_amds_tool() -> None:
    amd = {"device": "cuda:1", "hip": True, "device_uuid": "GPU-12"}
    broken, slow = {**amd, "matmuls": (matmul(150, WRONG),)}, {**amd, "matmuls": (matmul(60),)}
    for record in (broken, slow):
        fix = only(collectives.judge_collectives(ranks(r0=amd, r1=amd, r2=record))).fix
        assert "amd-smi metric" in fix
        assert "nvidia-smi" not in fix


def test_a_rank_that_spoils_sums_is_named_though_all_see_them_wrong(
    snapshot: SnapshotAssertion,
) -> None:
    wrong = {
        "operations": (Operation(name="all-reduce", values=WRONG),),
        "suspects": ((1,),),
    }
    finding = only(collectives.judge_collectives(ranks(r0=wrong, r1=wrong, r2=wrong)))
    assert finding.name == "wrong-values"
    assert finding.what.startswith("node2, CPU (rank 1): ")
    assert "all-reduce" in finding.what
    assert "3 of 3,000" in finding.evidence
    assert finding == snapshot


def test_where_only_two_together_are_wrong_both_are_named(snapshot: SnapshotAssertion) -> None:
    wrong = {"operations": (Operation(name="all-reduce", values=WRONG),), "suspects": ((0, 1),)}
    finding = only(collectives.judge_collectives(ranks(r0=wrong, r1=wrong)))
    assert finding.name == "wrong-values"
    assert "rank 0" in finding.what
    assert "rank 1" in finding.what
    assert finding == snapshot


def test_a_wrong_value_that_did_not_come_again_is_told_all_the_same(
    snapshot: SnapshotAssertion,
) -> None:
    finding = only(
        collectives.judge_collectives(
            ranks(r1={"operations": (Operation(name="all-reduce", values=WRONG),)})
        )
    )
    assert finding.what.startswith("node2, CPU (rank 1): ")
    assert finding == snapshot


def test_who_gathers_wrong_parts_from_all_is_named(snapshot: SnapshotAssertion) -> None:
    gathered = Operation(name="all-gather", values=WRONG, wrong_from={0: 1, 2: 1})
    finding = only(collectives.judge_collectives(ranks(r1={"operations": (gathered,)})))
    assert finding.what.startswith("node2, CPU (rank 1): ")
    assert "all-gather" in finding.what
    assert finding == snapshot


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


def test_wrong_values_between_two_ask_for_a_second_try(snapshot: SnapshotAssertion) -> None:
    assert wrong_values.second_try(broken_p2p()) == wrong_values.SECOND_TRY
    finding = only(collectives.judge_collectives(broken_p2p()))
    assert finding.name == "p2p-wrong"
    assert "node2, CPU (rank 1)" in finding.what
    assert finding == snapshot


def test_a_second_try_that_is_right_gives_the_cure(snapshot: SnapshotAssertion) -> None:
    finding = only(collectives.judge_collectives(broken_p2p(), ranks()))
    assert finding.status is Status.FAILURE
    assert finding.fix.splitlines()[0] == "export NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0"
    assert "NCCL_P2P_DISABLE=1" in finding.why
    assert finding == snapshot


def test_a_second_try_that_is_no_better_is_told(snapshot: SnapshotAssertion) -> None:
    finding = only(collectives.judge_collectives(broken_p2p(), broken_p2p()))
    assert "NCCL_P2P_DISABLE=1" in finding.why
    assert finding == snapshot
    assert "export" not in finding.fix


def broken_sums(backend: str = "nccl") -> list[RankRecord]:
    wrong = {"operations": (Operation(name="all-reduce", values=WRONG),), "suspects": ((1,),)}
    return [replace(one, backend=backend) for one in ranks(r1=wrong)]


def test_wrong_sums_of_nccl_are_tried_again_without_nvlink_sharp(
    snapshot: SnapshotAssertion,
) -> None:
    assert wrong_values.second_try(broken_sums())["NCCL_NVLS_ENABLE"] == "0"
    assert wrong_values.second_try(broken_sums("gloo")) == {}
    finding = only(collectives.judge_collectives(broken_sums(), ranks()))
    assert (finding.name, finding.status) == ("wrong-values", Status.FAILURE)
    assert finding.fix.splitlines()[0] == "export NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0"
    assert finding == snapshot
    finding = only(collectives.judge_collectives(broken_sums(), broken_sums()))
    assert "export" not in finding.fix
    assert "NCCL_NVLS_ENABLE=0" in finding.why


def test_a_second_try_that_failed_is_no_cure() -> None:
    failed = [replace(one, trouble=Trouble(stage="group", problem="error")) for one in ranks()]
    for broken in (broken_sums(), broken_p2p()):
        assert "export" not in only(collectives.judge_collectives(broken, failed)).fix
        assert "export" not in only(collectives.judge_collectives(broken, [])).fix


def test_a_device_that_computes_wrong_results_needs_no_second_try() -> None:
    broken = [replace(one, matmuls=(matmul(1, WRONG),)) for one in broken_sums()]
    assert wrong_values.second_try(broken) == {}


# ---- hangs and errors


def test_a_hang_names_the_rank_that_all_others_wait_for(snapshot: SnapshotAssertion) -> None:
    waiting = {"trouble": Trouble(stage="collectives", problem="hangs", ranks=(2,))}
    finding = only(collectives.judge_collectives(ranks(r0=waiting, r1=waiting, r2=waiting)))
    assert (finding.name, finding.status) == ("collective-hangs", Status.FAILURE)
    assert finding.what.startswith("node3, CPU (rank 2) ")
    assert finding == snapshot
    assert "on node3: " in finding.fix
    assert finding.fix.splitlines()[1].startswith("ps -eo pid,stat")


def test_a_rank_that_was_never_heard_is_missing(snapshot: SnapshotAssertion) -> None:
    absent = {"trouble": Trouble(stage="collectives", problem="absent", ranks=(2,))}
    finding = only(collectives.judge_collectives(ranks(r0=absent, r1=absent)[:2]))
    assert finding.name == "collective-hangs"
    assert finding.what.startswith("rank 2 ")
    assert finding == snapshot


def test_a_rank_that_fell_silent_is_named_and_the_errors_of_the_others_are_its_consequence(
    snapshot: SnapshotAssertion,
) -> None:
    silent = {"stage": "pairs", "ended": False}
    error = {"trouble": Trouble(stage="pairs", problem="error", text="RuntimeError: closed")}
    finding = only(collectives.judge_collectives(ranks(2, r0=error, r1=silent)))
    assert finding.name == "collective-hangs"
    assert finding.what.startswith("node2, CPU (rank 1) ")
    assert finding == snapshot


def test_an_error_is_told_once_with_its_text(snapshot: SnapshotAssertion) -> None:
    error = {"trouble": Trouble(stage="collectives", problem="error", text="RuntimeError: broken")}
    finding = only(collectives.judge_collectives(ranks(r0=error, r1=error, r2=error)))
    assert finding.name == "collective-fails"
    assert finding.what.startswith("node1, CPU (rank 0) ")
    assert "RuntimeError: broken" in finding.what
    assert finding == snapshot
    assert len(finding.evidence.splitlines()) == 3


# ---- slowness


def test_a_slow_machine_is_named_with_its_share(snapshot: SnapshotAssertion) -> None:
    finding = only(collectives.judge_collectives(ranks(4, r3={"matmuls": (matmul(30),)})))
    assert (finding.name, finding.status) == ("slow-host", Status.WARNING)
    assert finding.what.startswith("node4 ")
    assert "20%" in finding.what
    assert finding == snapshot


def test_one_slow_device_of_a_machine_is_named_itself(snapshot: SnapshotAssertion) -> None:
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
    assert finding == snapshot


def test_of_two_the_slower_is_named(snapshot: SnapshotAssertion) -> None:
    finding = only(collectives.judge_collectives(ranks(2, r0={"matmuls": (matmul(80),)})))
    assert finding.name == "slow-host"
    assert finding.what.startswith("node1 ")
    assert "53%" in finding.what
    assert finding == snapshot


def test_heat_under_load_is_a_warning_and_a_power_limit_a_note(snapshot: SnapshotAssertion) -> None:
    hot = Health(temperature_c=91, throttled_by=("heat (hardware)",))
    finding = only(collectives.judge_collectives(ranks(r1={"health": hot})))
    assert (finding.name, finding.status) == ("gpu-hot", Status.WARNING)
    assert finding.what.startswith("node2, CPU (rank 1) ")
    assert "heat (hardware)" in finding.what
    assert finding == snapshot
    capped = Health(throttled_by=("power limit",))
    assert only(collectives.judge_collectives(ranks(r1={"health": capped}))).status is Status.NOTE


def test_slow_pairs_of_one_rank_are_one_finding(snapshot: SnapshotAssertion) -> None:
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
    assert finding == snapshot


# ---- the library


def test_gpus_that_are_not_used_together_are_told_with_the_reason(
    snapshot: SnapshotAssertion,
) -> None:
    reason = "gloo instead of nccl on all ranks: rank 1 on node2: torch sees no GPU on this host"
    group = ranks(2, r0={"accelerator": "cuda", "backend_reason": reason})
    finding = only(collectives.judge_collectives(group))
    assert (finding.name, finding.status) == ("gloo-beside-gpus", Status.WARNING)
    assert "1 of 2" in finding.what
    assert "node2" in finding.fix
    assert finding == snapshot
    assert finding.why.startswith(reason)
