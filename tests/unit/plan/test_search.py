"""Which ways there are, and how they become settings that a training takes."""

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_plans import hardware, question
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import Impossible
from torchmuster.plan.answer import as_settings, candidate_name
from torchmuster.plan.job import Candidate
from torchmuster.plan.search.candidates import batch_splits, device_spreads
from torchmuster.train.strategies.sharding import Sharding, ShardLayout, choose_layout


def names(**asked: object) -> list[str]:
    return [
        f"{candidate_name(one)} ({one.layout.ranks})"
        for one in device_spreads(question(asked.pop("on", None), **asked))  # type: ignore[arg-type]
    ]


def test_one_card_has_two_ways() -> None:
    assert names(on=hardware(cards=1)) == ["single (1)", "fsdp + offload (1)"]


def test_a_machine_has_the_ways_of_its_cards_and_one_card_alone() -> None:
    assert names() == [
        *("single (1)", "ddp (8)", "fsdp (8)", "shard_grad_op (8)", "fsdp + offload (8)"),
    ]


def test_machines_can_share_copies_in_all_sizes_that_divide_evenly() -> None:
    found = [one for one in names(on=hardware(machines=6)) if "offload" not in one]
    assert found == [
        *("single (1)", "ddp (48)", "ddp (8)"),
        *("fsdp (48)", "shard_grad_op (48)"),
        *("hybrid 2 x 24 (48)", "hybrid 3 x 16 (48)", "hybrid 6 x 8 (48)"),
        *("fsdp (8)", "shard_grad_op (8)"),
    ]


def test_what_is_fixed_leaves_the_rest_open() -> None:
    many = hardware(machines=4)
    assert names(on=many, strategy="ddp") == ["ddp (32)"]
    assert names(on=many, shard_size=4, cpu_offload=False) == [
        "hybrid 8 x 4 (32)",
        "hybrid 2 x 4 (8)",
    ]
    assert names(on=many, sharding="shard_grad_op") == ["shard_grad_op (32)", "shard_grad_op (8)"]
    assert names(on=hardware(cards=1), strategy="fsdp", cpu_offload=False) == [
        *("fsdp (1)", "shard_grad_op (1)"),
    ]


def test_a_size_of_shards_that_was_asked_for_is_taken_once() -> None:
    many = hardware(machines=96)
    assert names(on=many, shard_size=24, cpu_offload=False) == ["hybrid 32 x 24 (768)"]
    for machines in (1, 6, 96):
        for size in (None, 8, 16, 24):
            if size is None or machines * 8 % size == 0:
                found = device_spreads(question(hardware(machines=machines), shard_size=size))
                assert len(found) == len(set(found)), (machines, size)
    assert names(on=many, shard_size=768, cpu_offload=False) == [
        *("fsdp (768)", "shard_grad_op (768)"),
    ]


def test_contradictions_are_refused_with_what_was_fixed(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as refused:
        names(strategy="ddp", cpu_offload=True)
    assert "cpu_offload True" in refused.value.why
    assert refused.value == snapshot


def test_micro_batches_are_powers_of_two_and_divisors_of_a_ranks_part() -> None:
    spread = Candidate(strategy="ddp", layout=ShardLayout(copies=8, shards=1))
    sizes = [
        (one.micro_batch_size, one.accumulation)
        for one in batch_splits(spread, question(global_batch_size=96))
    ]
    assert sizes == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (8, 2), (12, 1)]
    fixed = question(global_batch_size=96, micro_batch_size=5)
    assert [(one.micro_batch_size, one.accumulation) for one in batch_splits(spread, fixed)] == [
        (5, 3)
    ]
    open_end = [one.micro_batch_size for one in batch_splits(spread, question())]
    assert open_end == [1, 2, 4, 8], "no more than muster train gives a rank by itself"
    given = question(micro_batch_size=48)
    assert [one.micro_batch_size for one in batch_splits(spread, given)] == [48]


@pytest.mark.parametrize("one", device_spreads(question(hardware(machines=4))), ids=candidate_name)
def test_a_way_becomes_settings_that_lay_the_model_out_so(one: Candidate) -> None:
    asked = question(hardware(machines=4))
    chosen = as_settings(one, asked)
    flags = [Flag(flag="plan", path=path, text=text) for path, text in chosen.items()]
    settings = resolve_settings(flags=flags).settings
    assert settings.train.global_batch_size == one.global_batch_size
    assert settings.train.micro_batch_size == one.micro_batch_size
    ranks = one.layout.ranks
    if ranks < 32:
        assert settings.distributed.num_gpus == min(ranks, 8)
    if one.strategy == "fsdp":
        sharding = Sharding(
            kind=settings.distributed.fsdp_sharding_strategy,
            shard_size=settings.distributed.fsdp_shard_size,
            cpu_offload=settings.distributed.fsdp_cpu_offload,
        )
        machines = [8] * (ranks // 8)
        assert choose_layout(sharding, ranks_of_machines=machines).value == one.layout
        assert sharding.cpu_offload == one.cpu_offload
