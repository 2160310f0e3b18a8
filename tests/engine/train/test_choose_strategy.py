"""How a model is spread, and why: a pure choice over sizes."""

from dataclasses import replace

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible
from torchmuster.train.precision import BF16, FP16
from torchmuster.train.strategies.choose import (
    ModelSizes,
    build_strategy,
    choose_strategy,
    sizes_of,
)
from torchmuster.train.strategies.fsdp import Fsdp
from torchmuster.train.strategies.sharding import Sharding, ShardLayout, choose_layout
from torchmuster.units import GiB

pytestmark = pytest.mark.engine

SMALL = ModelSizes(parameter_bytes=GiB // 10, trained_bytes=GiB // 10)
LARGE = ModelSizes(parameter_bytes=28 * GiB, trained_bytes=28 * GiB)
WORLD = made_up_world()


def test_fp16_with_shards_in_the_hosts_memory_is_refused_on_accelerators(
    snapshot: SnapshotAssertion,
) -> None:
    offload = Sharding(cpu_offload=True)
    build_strategy("fsdp", WORLD, sharding=offload, precision=FP16)
    world = replace(WORLD, device=torch.device("cuda", 0), backend="nccl")
    build_strategy("fsdp", world, sharding=offload, precision=BF16)
    with pytest.raises(Impossible) as refused:
        build_strategy("fsdp", world, sharding=offload, precision=FP16)
    assert "fsdp_cpu_offload" in refused.value.what
    assert refused.value == snapshot


def test_states_are_parameters_and_what_each_trained_one_brings_along() -> None:
    model = nn.ModuleList([nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False).bfloat16()])
    model[0].requires_grad_(False)
    sizes = sizes_of(model)
    assert sizes == ModelSizes(parameter_bytes=600, trained_bytes=200)
    assert sizes.states_bytes == 600 + 3 * 200


@pytest.mark.parametrize(
    ("ranks", "sizes", "memory_bytes", "reason"),
    [
        (1, LARGE, 40 * GiB, "single: there is one rank"),
        (
            2,
            SMALL,
            40 * GiB,
            "ddp: the model's states take 410 MiB of 40.0 GiB on each rank, so every rank can hold a "
            "copy",
        ),
        (
            2,
            SMALL,
            None,
            "ddp: the model's states take 410 MiB, and the memory of each rank is unknown; "
            "use fsdp if they do not fit",
        ),
        (
            8,
            LARGE,
            40 * GiB,
            "fsdp: the model's states take 112 GiB, too much for the 40.0 GiB of each rank; sharded "
            "over 8 ranks they take 14.0 GiB",
        ),
        (
            2,
            LARGE,
            40 * GiB,
            "fsdp: the model's states take 112 GiB, too much for the 40.0 GiB of each rank; sharded "
            "over 2 ranks they take 56.0 GiB, which is still too much: use more ranks, "
            "fsdp_cpu_offload, LoRA or a smaller dtype",
        ),
    ],
)
def test_auto_takes_the_simplest_that_has_room(
    ranks: int, sizes: ModelSizes, memory_bytes: int | None, reason: str
) -> None:
    decision = choose_strategy("auto", ranks=ranks, sizes=sizes, memory_bytes=memory_bytes)
    assert decision.reason == reason
    assert decision.value == reason.partition(":")[0]


def test_options_of_fsdp_ask_for_fsdp(snapshot: SnapshotAssertion) -> None:
    offload = Sharding(cpu_offload=True)
    decision = choose_strategy("auto", ranks=1, sizes=SMALL, memory_bytes=GiB, sharding=offload)
    assert decision.value == "fsdp"
    assert "fsdp_cpu_offload" in decision.reason
    hybrid = Sharding(kind="hybrid_shard")
    decision = choose_strategy("auto", ranks=4, sizes=SMALL, memory_bytes=GiB, sharding=hybrid)
    assert decision.value == "fsdp"
    assert "hybrid_shard" in decision.reason
    assert decision.reason == snapshot
    alone = choose_strategy("auto", ranks=1, sizes=SMALL, memory_bytes=GiB, sharding=hybrid)
    assert alone.value == "single"


def test_no_shard_is_ddp(snapshot: SnapshotAssertion) -> None:
    none = Sharding(kind="no_shard")
    decision = choose_strategy("fsdp", ranks=4, sizes=LARGE, memory_bytes=GiB, sharding=none)
    assert decision.value == "ddp"
    assert decision.reason == snapshot
    with pytest.raises(Impossible, match="fsdp was requested with no_shard") as refused:
        Fsdp(WORLD, sharding=none)
    assert refused.value == snapshot
    with pytest.raises(Impossible, match="no_shard") as refused:
        choose_strategy(
            "fsdp",
            ranks=4,
            sizes=LARGE,
            memory_bytes=GiB,
            sharding=Sharding(kind="no_shard", cpu_offload=True),
        )
    assert refused.value == snapshot


def test_contradictions_are_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible, match="4 ranks") as single:
        choose_strategy("single", ranks=4, sizes=SMALL, memory_bytes=GiB)
    assert single.value == snapshot
    with pytest.raises(Impossible) as options:
        choose_strategy("ddp", ranks=4, sizes=SMALL, memory_bytes=GiB, sharding=Sharding())
    assert options.value == snapshot
    with pytest.raises(Impossible) as refused:
        build_strategy("ddp", WORLD, sharding=Sharding(cpu_offload=True))
    assert str(refused.value) == str(options.value)
    with pytest.raises(Impossible, match="find_unused_parameters") as refused:
        build_strategy("fsdp", WORLD, find_unused_parameters=True)
    assert refused.value == snapshot


@pytest.mark.parametrize(
    ("sharding", "machines", "layout", "reason"),
    [
        (Sharding(), [4, 4], (1, 8), "full_shard: one copy of the model, sharded over all 8 ranks"),
        (
            Sharding(kind="hybrid_shard"),
            [4, 4],
            (2, 4),
            "hybrid_shard: 2 copies, each sharded over 4 ranks",
        ),
        (
            Sharding(kind="hybrid_shard", shard_size=2),
            [3, 5],
            (4, 2),
            "hybrid_shard: 4 copies, each sharded over 2 ranks",
        ),
        (
            Sharding(kind="hybrid_shard"),
            [8],
            (1, 8),
            "hybrid_shard: all 8 ranks hold one copy, so there is nothing to replicate: the same as "
            "full_shard",
        ),
        (
            Sharding(kind="hybrid_shard"),
            [1, 1, 1],
            (3, 1),
            "hybrid_shard: each of 3 ranks holds a whole copy, so nothing is sharded: ddp does the "
            "same with less communication",
        ),
    ],
)
def test_ranks_share_the_model_as_the_kind_of_sharding_says(
    sharding: Sharding, machines: list[int], layout: tuple[int, int], reason: str
) -> None:
    decision = choose_layout(sharding, ranks_of_machines=machines)
    copies, shards = layout
    assert decision.value == ShardLayout(copies=copies, shards=shards)
    assert decision.reason == reason


@pytest.mark.parametrize(
    ("sharding", "machines", "text"),
    [
        (
            Sharding(kind="hybrid_shard"),
            [4, 2],
            "hybrid_shard was requested, which shards within each host\nthe hosts have different "
            "numbers of ranks: 2, 4\ngive each host the same number of ranks, set a shard size that "
            "divides their sum, or use full_shard",
        ),
        (
            Sharding(kind="hybrid_shard", shard_size=4),
            [6],
            "a shard size of 4 ranks was requested\nthere are 6 ranks, which is not a "
            "multiple of 4\nuse a shard size that divides 6, or full_shard",
        ),
        (
            Sharding(shard_size=2),
            [4],
            "a shard size of 2 ranks was requested with full_shard\nfull_shard shards over all 4 "
            "ranks\nremove the shard size, or use hybrid_shard",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    sharding: Sharding, machines: list[int], text: str
) -> None:
    with pytest.raises(Impossible) as refused:
        choose_layout(sharding, ranks_of_machines=machines)
    assert str(refused.value) == text


def test_fsdp_on_a_gpu_needs_more_than_gloo() -> None:
    on_gpu = replace(
        WORLD, device=torch.device("cuda", 3), reasons=("gloo instead of nccl: rank 1",)
    )
    with pytest.raises(Impossible, match="with gloo") as refused:
        Fsdp(on_gpu)
    assert refused.value.why == "gloo instead of nccl: rank 1"
    Fsdp(replace(on_gpu, backend="nccl"))
