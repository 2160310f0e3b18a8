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
from torchmuster.train.strategies.sharding import Sharding, lay_out
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
            "ddp: the model's states take 410 MiB; the memory of each rank is unknown",
        ),
        (
            8,
            LARGE,
            40 * GiB,
            "fsdp: the model's states take 112 GiB of 40.0 GiB on each rank; sharded "
            "over 8 ranks they take 14.0 GiB",
        ),
        (
            2,
            LARGE,
            40 * GiB,
            "fsdp: the model's states take 112 GiB of 40.0 GiB on each rank; sharded "
            "over 2 ranks they take 56.0 GiB, still too much: use more ranks, "
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


def test_options_of_fsdp_choose_fsdp() -> None:
    offload, hybrid = Sharding(cpu_offload=True), Sharding(kind="hybrid_shard")
    decision = choose_strategy("auto", ranks=1, sizes=SMALL, memory_bytes=GiB, sharding=offload)
    assert decision.value == "fsdp"
    decision = choose_strategy("auto", ranks=4, sizes=SMALL, memory_bytes=GiB, sharding=hybrid)
    assert decision.value == "fsdp"
    alone = choose_strategy("auto", ranks=1, sizes=SMALL, memory_bytes=GiB, sharding=hybrid)
    assert alone.value == "single"


def test_no_shard_is_ddp() -> None:
    none = Sharding(kind="no_shard")
    decision = choose_strategy("fsdp", ranks=4, sizes=LARGE, memory_bytes=GiB, sharding=none)
    assert decision.value == "ddp"


def test_contradictions_are_refused() -> None:
    with pytest.raises(Impossible, match="4 ranks"):
        choose_strategy("single", ranks=4, sizes=SMALL, memory_bytes=GiB)
    with pytest.raises(Impossible, match="ddp does not support"):
        choose_strategy("ddp", ranks=4, sizes=SMALL, memory_bytes=GiB, sharding=Sharding())
    with pytest.raises(Impossible, match="ddp does not support"):
        build_strategy("ddp", WORLD, sharding=Sharding(cpu_offload=True))
    with pytest.raises(Impossible, match="find_unused_parameters was requested with fsdp"):
        build_strategy("fsdp", WORLD, find_unused_parameters=True)


@pytest.mark.parametrize(
    ("sharding", "layout"),
    [
        (Sharding(), (1, 8)),
        (Sharding(kind="shard_grad_op"), (1, 8)),
        (Sharding(kind="hybrid_shard"), (2, 4)),
        (Sharding(kind="hybrid_shard", shard_size=2), (4, 2)),
    ],
)
def test_the_layout_of_shards(sharding: Sharding, layout: tuple[int, int]) -> None:
    made = lay_out(sharding, replace(WORLD, world_size=8, local_world_size=4))
    assert (made.copies, made.shards) == layout


def test_groups_of_another_size_are_refused() -> None:
    world = replace(WORLD, world_size=6, local_world_size=4)
    with pytest.raises(Impossible, match="cannot divide 6 ranks into groups of 4"):
        lay_out(Sharding(kind="hybrid_shard"), world)
