"""Known cards: found by any of their names, and unknown ones refused with what is near."""

import pytest
from syrupy.assertion import SnapshotAssertion

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
        ("2080ti", "RTX-2080-Ti"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_a_card_is_found_by_the_names_that_people_and_drivers_give_it(
    asked: str, found: str
) -> None:
    assert catalogue.known_gpu(asked).card.name == found


def test_every_card_is_found_by_its_own_name_and_has_figures_to_compute_with() -> None:
    for known in catalogue.all_known():
        card = catalogue.known_gpu(known.card.name).card
        assert card is known.card
        assert 10 * GiB < card.memory_bytes < 200 * GiB
        assert (card.bandwidth_bytes_s or 0) > 1e11
        assert card.flops["float32"] <= card.flops["float16"]
        assert card.source


def test_a_card_says_who_quotes_its_figures_or_that_nobody_was_asked(
    snapshot: SnapshotAssertion,
) -> None:
    sources = {known.card.name: known.card.source for known in catalogue.all_known()}
    assert sources["H100"] == snapshot
    assert sources["MI210"] == snapshot
    assert sources["A10G"] == snapshot
    assert not [name for name, source in sources.items() if "data sheet" in source]


def test_what_a_card_has_no_units_for_is_missing() -> None:
    assert "bfloat16" not in catalogue.known_gpu("T4").card.flops
    assert "bfloat16" not in catalogue.known_gpu("V100").card.flops


def test_an_unknown_card_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(Impossible) as caught:
        catalogue.known_gpu("H1000")
    assert caught.value.what == "H1000 is not in the GPU catalogue"
    assert "H100" in caught.value.why
    assert "use one of these" in caught.value.fix
    assert catalogue.find_gpu("H1000") is None


@pytest.mark.parametrize("name", ["A100-60GB", "", "NVIDIA H100 MIG 1g.10gb"])
def test_another_size_of_a_known_card_is_not_taken_for_it(name: str) -> None:
    with pytest.raises(Impossible):
        catalogue.known_gpu(name)
