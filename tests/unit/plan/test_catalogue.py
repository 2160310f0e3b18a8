"""Known cards: found by any of their names, and unknown ones refused with what is near."""

import pytest

from torchmuster.errors import Impossible
from torchmuster.plan.hardware import catalogue
from torchmuster.units import GiB


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("H100", "H100"),
        ("h100-80gb", "H100"),
        ("H100-SXM", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("a100", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("2080ti", "RTX-2080-Ti"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_a_card_is_found_by_the_names_that_people_and_drivers_give_it(
    asked: str, found: str
) -> None:
    assert catalogue.known_gpu(asked).name == found


def test_every_card_is_found_by_its_own_name_and_has_figures_to_compute_with() -> None:
    for card in catalogue.all_known():
        assert catalogue.known_gpu(card.name) is card
        assert 10 * GiB < card.memory_bytes < 200 * GiB
        assert (card.bandwidth_bytes_s or 0) > 1e11
        assert card.flops["float32"] <= card.flops["float16"]
        assert card.source


def test_what_a_card_has_no_units_for_is_missing() -> None:
    assert "bfloat16" not in catalogue.known_gpu("T4").flops
    assert "bfloat16" not in catalogue.known_gpu("V100").flops


def test_an_unknown_card_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(Impossible) as caught:
        catalogue.known_gpu("H1000")
    assert caught.value.what == "H1000 is not in the GPU catalogue"
    assert "H100" in caught.value.why
    assert "use one of these" in caught.value.fix
    assert catalogue.find_gpu("H1000") is None


@pytest.mark.parametrize("name", ["A100-60GB", "", "80GB", "NVIDIA H100 MIG 1g.10gb"])
def test_another_size_of_a_known_card_is_not_taken_for_it(name: str) -> None:
    with pytest.raises(Impossible):
        catalogue.known_gpu(name)


@pytest.mark.parametrize(
    ("text", "described", "cards"),
    [
        ("H100", "1 x H100", 1),
        ("8xH100", "8 x H100", 8),
        ("2x8xA100-80GB", "2 machines with 8 x A100-80GB each", 16),
        ("3 x 4 x v100-32gb", "3 machines with 4 x V100-32GB each", 12),
        ("8x4090", "8 x RTX-4090", 8),
    ],
)
def test_hardware_is_counted(text: str, described: str, cards: int) -> None:
    hardware = catalogue.parse_hardware(text)
    assert (hardware.describe(), hardware.cards) == (described, cards)


def test_cards_without_a_network_of_their_own_share_the_machines() -> None:
    rates = {}
    for text in ("2x4xT4", "2x8xT4", "2x4xH100", "2x8xH100"):
        rates[text] = catalogue.parse_hardware(text).between_bytes_s
    assert rates["2x4xT4"] == pytest.approx(rates["2x8xT4"] * 2)
    assert rates["2x4xH100"] == rates["2x8xH100"]


def test_no_cards_at_all_are_refused() -> None:
    with pytest.raises(Impossible, match="0xH100") as caught:
        catalogue.parse_hardware("0xH100")
    assert "8xH100" in caught.value.fix
