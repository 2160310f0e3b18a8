"""Hardware by name."""

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.plan.hardware import described
from torchmuster.plan.hardware.catalogue import Hardware


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
