"""Hardware by name, and this machine."""

import dataclasses

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.devices.model import Device, DeviceKind, LinkKind, Node
from torchmuster.devices.model import Link as DeviceLink
from torchmuster.errors import Impossible
from torchmuster.plan.hardware import described, here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.units import GiB


def parsed(text: str) -> Hardware:
    return described.parse_hardware(text)


@pytest.mark.parametrize(
    ("text", "words", "cards"),
    [
        ("H100", "1 x H100", 1),
        ("8xH100", "8 x H100", 8),
        ("2x8xA100-80GB", "2 machines with 8 x A100-80GB each", 16),
        ("3 x 4 x v100-32gb", "3 machines with 4 x V100-32GB each", 12),
        ("8x4090", "8 x RTX-4090", 8),
        ("16384xH100", "2048 machines with 8 x H100 each", 16384),
        ("12xH100", "2 machines with 6 x H100 each", 12),
        ("8xGH200", "8 machines with 1 x GH200 each", 8),
    ],
)
def test_counts_of_cards(text: str, words: str, cards: int) -> None:
    hardware = parsed(text)
    assert described.describe_hardware(hardware) == words
    assert hardware.cards == cards


def test_what_was_not_said_is_told(snapshot: SnapshotAssertion) -> None:
    for hardware in ("16384xH100", "8xGH200", "2xa100", "8xB200"):
        assert parsed(hardware).assumed == snapshot(name=hardware)
    assert parsed("8xH100").assumed == ()


def test_cards_without_a_network_of_their_own_share_the_machine_s() -> None:
    assert parsed("2x4xT4").between_bytes_s == pytest.approx(parsed("2x8xT4").between_bytes_s * 2)
    assert parsed("2x4xH100").between_bytes_s == parsed("2x8xH100").between_bytes_s


def test_no_cards_at_all_are_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as caught:
        parsed("0xH100")
    assert caught.value == snapshot
    assert "8xH100" in caught.value.fix


CPU = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="A processor", total_bytes=64 * GiB)


def node(*cards: Device, links: tuple[DeviceLink, ...] = ()) -> Node:
    return Node(hostname="m", taken_unix_s=0.0, accelerators=cards, cpu=CPU, links=links)


def card(index: int, name: str, gib: float) -> Device:
    return Device(
        kind=DeviceKind.CUDA,
        index=index,
        uuid=f"GPU-{index}",
        name=name,
        total_bytes=int(gib * GiB),
    )


def test_ranks_on_a_processor_share_its_memory(snapshot: SnapshotAssertion) -> None:
    alone = here.hardware_here(node=node())
    four = here.hardware_here(node=node(), ranks=4)
    assert (alone.cards, four.cards) == (1, 4)
    assert four.card.memory_bytes * 4 == alone.card.memory_bytes == 64 * GiB
    assert four.host_memory_bytes == 64 * GiB
    assert alone.assumed == ()
    assert four.assumed == snapshot
    assert four.card.flops == {}


def test_cards_of_this_machine_have_the_memory_that_their_driver_says() -> None:
    linked = DeviceLink(a="GPU-0", b="GPU-1", kind=LinkKind.NVLINK, lanes=12)
    pair = (card(0, "NVIDIA A100-SXM4-80GB", 79.1), card(1, "NVIDIA A100-SXM4-80GB", 79.1))
    hardware = here.hardware_here(node=node(*pair, links=(linked,)))
    assert (hardware.card.name, hardware.cards) == ("A100-80GB", 2)
    assert hardware.card.memory_bytes == int(79.1 * GiB)
    assert hardware.within_bytes_s == 300e9
    slow = dataclasses.replace(linked, kind=LinkKind.SYS)
    assert here.hardware_here(node=node(*pair, links=(slow,))).within_bytes_s == 16e9
    plain = (card(0, "NVIDIA L4", 22), card(1, "NVIDIA L4", 22))
    assert here.hardware_here(node=node(*plain, links=(slow,))).within_bytes_s == 32e9


def test_more_ranks_than_cards_are_refused() -> None:
    with pytest.raises(Impossible) as caught:
        here.hardware_here(node=node(card(0, "NVIDIA L4", 22)), ranks=2)
    assert caught.value.why == "it has 1 GPU"
