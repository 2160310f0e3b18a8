"""This machine as hardware: the cards that a run would have, and what is taken of cards that differ."""

import dataclasses
import os
from unittest.mock import patch

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings
from torchmuster.devices import snapshot
from torchmuster.devices.model import Device, DeviceKind, Link, LinkKind, Node
from torchmuster.errors import Impossible, NoSuchDevice
from torchmuster.plan.hardware import here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.units import GiB

CPU = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="A processor", total_bytes=64 * GiB)
L4 = "NVIDIA L4"


def node(*cards: Device, links: tuple[Link, ...] = ()) -> Node:
    return Node(hostname="m", taken_unix_s=0.0, accelerators=cards, cpu=CPU, links=links)


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


def test_a_plan_is_for_the_cards_that_the_run_will_have(snapshot: SnapshotAssertion) -> None:
    assert of(EIGHT).cards == 8
    assert of(EIGHT, ("distributed.gpu_ids", "2,3")).cards == 2
    assert of(EIGHT, ("distributed.num_gpus", "4")).cards == 4
    assert of(EIGHT, seen="5,6,7").cards == 3
    assert of(EIGHT, ranks=2).cards == 2
    assert of(EIGHT, ("distributed.enabled", "false")).cards == 1
    assert of(OTHER, ("distributed.gpu_ids", "1")).card.name == "T4"
    assert of(OTHER, ("distributed.gpu_ids", "[0, GPU-2]")).card.name == "L4"
    assert of(OTHER, seen="1").card.name == "T4"
    with pytest.raises(NoSuchDevice) as refused:
        of(OTHER, ("distributed.gpu_ids", "0"), seen="1")
    assert refused.value == snapshot


def test_where_a_run_would_take_the_processor_so_does_the_plan(snapshot: SnapshotAssertion) -> None:
    assert of(EIGHT, seen="", ranks=2).card.kind == "cpu"
    assert of(EIGHT, ("model.device_map", "cpu")).card.kind == "cpu"
    assert of(node(), ("distributed.num_gpus", "8"), ranks=2).cards == 2
    with pytest.raises(Impossible) as refused:
        of(node(), ("distributed.num_gpus", "8"))
    assert "--hardware 8xH100" in refused.value.fix
    assert refused.value == snapshot


def test_more_cards_than_can_be_seen_are_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible, match="4 ranks") as refused:
        of(EIGHT, ("distributed.num_gpus", "4"), seen="0,1")
    assert refused.value == snapshot
    with pytest.raises(Impossible, match="--ranks 2") as refused:
        of(EIGHT, ("distributed.num_gpus", "4"), ranks=2)
    assert refused.value == snapshot


def test_a_gpu_in_mig_mode_is_none_and_one_slice_of_it_is_one(snapshot: SnapshotAssertion) -> None:
    whole = card(0, "NVIDIA A100-SXM4-40GB", 40, mig_enabled=True)
    slices = [
        card(0, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.5, mig_index=at, parent_uuid="GPU-0")
        for at in (0, 1)
    ]
    slices = [dataclasses.replace(one, uuid=f"MIG-{one.mig_index}") for one in slices]
    split = node(whole, *slices)
    with pytest.raises(Impossible) as refused:
        of(split)
    assert refused.value == snapshot
    assert "MIG slices" in refused.value.why
    assert "--num-gpus 1" in refused.value.fix
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
    (assumed,) = mixed.assumed
    assert "RTX-3090 and RTX-4090 differ" in assumed
    assert of(node(card(0), card(1))).assumed == ()
    joined = of(node(card(0, "NVIDIA A100-SXM4-80GB", 79), card(1, "NVIDIA A100 80GB PCIe", 79)))
    assert joined.within_bytes_s == 32e9


def test_a_card_that_is_not_known_has_no_rates() -> None:
    mixed = of(node(card(0, "NVIDIA H100 80GB HBM3", 79), card(1, "Novelty", 8)))
    assert mixed.card.memory_bytes == 8 * GiB
    assert mixed.card.flops == {}
    assert mixed.card.number_types is None
    with pytest.raises(Impossible, match="cannot plan for Novelty"):
        of(node(card(0), card(1, "Novelty", 8, total_bytes=None)))


@pytest.mark.parametrize(
    ("capability", "types"),
    [
        ((8, 6), ("bfloat16", "float16", "float32")),
        ((7, 5), ("float16", "float32")),
        ((6, 1), ("float32",)),
        (None, None),
    ],
)
def test_an_unlisted_card_has_the_number_types_of_its_compute_capability(
    capability: tuple[int, int] | None, types: tuple[str, ...] | None
) -> None:
    found = of(node(card(0, "Novelty", 8, compute_capability=capability)))
    assert found.card.number_types == types


def test_ranks_on_a_processor_share_its_memory() -> None:
    alone, four = of(node()), of(node(), ranks=4)
    assert (alone.cards, four.cards) == (1, 4)
    assert four.card.memory_bytes * 4 == alone.card.memory_bytes == 64 * GiB
    assert four.host_memory_bytes == 64 * GiB
    assert [len(alone.assumed), len(four.assumed)] == [0, 1]


def test_nvlink_counts_only_where_the_driver_reports_it() -> None:
    linked = Link(a="GPU-0", b="GPU-1", kind=LinkKind.NVLINK, lanes=12)
    pair = [card(index, "NVIDIA A100-SXM4-80GB", 79.1) for index in (0, 1)]
    fast = of(node(*pair, links=(linked,)))
    assert (fast.card.name, fast.card.memory_bytes) == ("A100-80GB", int(79.1 * GiB))
    assert fast.within_bytes_s == 300e9
    slow = dataclasses.replace(linked, kind=LinkKind.SYS)
    assert of(node(*pair, links=(slow,))).within_bytes_s == 16e9
    assert of(node(card(0), card(1), links=(slow,))).within_bytes_s == 32e9
