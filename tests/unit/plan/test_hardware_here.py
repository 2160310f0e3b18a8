"""This machine as hardware: the cards that a run would have, and what is taken of cards that differ."""

import dataclasses
import os
from typing import Any
from unittest.mock import patch

import pytest

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings
from torchmuster.devices import snapshot
from torchmuster.devices.model import Device, DeviceKind, Node
from torchmuster.errors import Impossible, NoSuchDevice
from torchmuster.plan.hardware import here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.units import GiB

CPU = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="A processor", total_bytes=64 * GiB)
L4 = "NVIDIA L4"


def node(*cards: Device) -> Node:
    return Node(hostname="m", taken_unix_s=0.0, accelerators=cards, cpu=CPU)


def card(index: int, name: str = L4, gib: float = 22, **more: object) -> Device:
    size = int(gib * GiB)
    one = Device(
        kind=DeviceKind.CUDA, index=index, uuid=f"GPU-{index}", name=name, total_bytes=size
    )
    return dataclasses.replace(one, **more)  # type: ignore[arg-type]


EIGHT = node(*(card(index) for index in range(8)))
# GPU 1 is another one, so that it shows which were taken.
OTHER = node(card(0), card(1, "Tesla T4", 14), card(2), card(3))


def settings(*flags: tuple[str, str]) -> Settings:
    return resolve_settings(
        flags=[Flag(flag="--set", path=path, text=text) for path, text in flags]
    ).settings


def of(
    on: Node, *flags: tuple[str, str], seen: str | None = None, ranks: int | None = None
) -> Hardware:
    environment = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    with (
        patch.object(snapshot, "take_snapshot", lambda: on),
        patch.dict(os.environ, environment, clear=True),
    ):
        return here.hardware_here(settings(*flags), ranks=ranks)


@pytest.mark.parametrize(
    ("flags", "cards"),
    [
        ({}, 8),
        ({"seen": "5,6,7"}, 3),
        ({"ranks": 2}, 2),
        ({"path": ("distributed.gpu_ids", "2,3")}, 2),
        ({"path": ("distributed.num_gpus", "4")}, 4),
        ({"path": ("distributed.enabled", "false")}, 1),
    ],
)
def test_a_plan_is_for_the_cards_that_the_run_will_have(flags: dict[str, Any], cards: int) -> None:
    paths = [flags["path"]] if "path" in flags else []
    found = of(EIGHT, *paths, seen=flags.get("seen"), ranks=flags.get("ranks"))
    assert found.cards == cards
    assert found.card.kind == "cuda"


def test_named_cards_are_planned_for() -> None:
    assert of(OTHER, ("distributed.gpu_ids", "1")).card.name == "T4"
    assert of(OTHER, ("distributed.gpu_ids", "[0, GPU-2]")).card.name == "L4"
    assert of(OTHER, seen="1").card.name == "T4"
    with pytest.raises(NoSuchDevice):
        of(OTHER, ("distributed.gpu_ids", "0"), seen="1")


def test_where_a_run_would_take_the_processor_so_does_the_plan() -> None:
    assert of(EIGHT, seen="", ranks=2).card.kind == "cpu"
    assert of(EIGHT, ("model.device_map", "cpu")).card.kind == "cpu"
    assert of(node(), ("distributed.num_gpus", "8"), ranks=2).cards == 2


def test_more_cards_than_can_be_used_are_refused() -> None:
    for flags in ({"on": node()}, {"on": EIGHT, "seen": "0,1"}):
        with pytest.raises(Impossible, match="8 ranks on GPUs of this machine") as refused:
            of(flags["on"], ("distributed.num_gpus", "8"), seen=flags.get("seen"))
        assert "--hardware 8xH100" in refused.value.fix


def test_a_gpu_in_mig_mode_is_none_and_one_slice_of_it_is_one() -> None:
    whole = card(0, "NVIDIA A100-SXM4-40GB", 40, mig_enabled=True)
    slices = [
        card(0, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.5, mig_index=at, parent_uuid="GPU-0")
        for at in (0, 1)
    ]
    slices = [dataclasses.replace(one, uuid=f"MIG-{one.mig_index}") for one in slices]
    split = node(whole, *slices)
    with pytest.raises(Impossible, match="this machine") as refused:
        of(split)
    assert "MIG" in refused.value.why
    assert "--num-gpus" in refused.value.fix
    alone = of(split, ("distributed.gpu_ids", "0:1"))
    assert (alone.cards, alone.card.memory_bytes) == (1, int(19.5 * GiB))
    assert alone.card.flops == {}  # a slice has a part of them, and nobody says which
    assert of(split, ("distributed.num_gpus", "1")).cards == 1
    assert of(node(whole, *slices, card(1))).cards == 1


def test_cards_that_differ_are_planned_as_the_one_with_the_least_memory() -> None:
    mixed = of(
        node(card(0, "NVIDIA GeForce RTX 3090", 24.0), card(1, "NVIDIA GeForce RTX 4090", 23.6))
    )
    assert mixed.card.memory_bytes == int(23.6 * GiB)
    assert mixed.card.name == "RTX-4090"
    assert "assumes RTX-4090 for all" in mixed.assumed[0]
    assert of(node(card(0), card(1))).assumed == ()


def test_a_card_that_is_not_known_has_no_rates() -> None:
    mixed = of(node(card(0, "NVIDIA H100 80GB HBM3", 79), card(1, "Novelty", 8)))
    assert mixed.card.memory_bytes == 8 * GiB
    assert mixed.card.flops == {}
    with pytest.raises(Impossible, match="cannot plan for Novelty"):
        of(node(card(0), card(1, "Novelty", 8, total_bytes=None)))


def test_ranks_on_a_processor_share_its_memory() -> None:
    alone, four = of(node()), of(node(), ranks=4)
    assert (alone.cards, four.cards) == (1, 4)
    assert four.card.memory_bytes * 4 == alone.card.memory_bytes == 64 * GiB
    assert four.host_memory_bytes == 64 * GiB
