"""Which number type all ranks use, decided on cards that are made up."""

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible
from torchmuster.train.precision import PrecisionSupport, choose_precision, precision_support

pytestmark = pytest.mark.engine

A100 = PrecisionSupport(kind="cuda", name="NVIDIA A100", has_bf16=True, compute_capability=(8, 0))
H100 = PrecisionSupport(kind="cuda", name="NVIDIA H100", has_bf16=True, compute_capability=(9, 0))
T4 = PrecisionSupport(kind="cuda", name="Tesla T4", has_bf16=False, compute_capability=(7, 5))
P40 = PrecisionSupport(kind="cuda", name="Tesla P40", has_bf16=False, compute_capability=(6, 1))
MI250 = PrecisionSupport(kind="cuda", name="AMD Instinct MI250", has_bf16=True)
CPU = PrecisionSupport(kind="cpu", name="CPU", has_bf16=True)


@pytest.mark.parametrize(
    ("of_ranks", "reason"),
    [
        (
            [A100, A100, H100],
            "bf16: every GPU supports it (NVIDIA A100 (Compute 8.0), NVIDIA H100 (Compute 9.0)); "
            "no loss scale needed",
        ),
        ([MI250], "bf16: every GPU supports it (AMD Instinct MI250); no loss scale needed"),
        (
            [A100, A100, A100, T4],
            "fp16: rank 3's Tesla T4 (Compute 7.5) does not support bf16; all ranks use one dtype",
        ),
        (
            [T4, A100, P40],
            "fp32: rank 2's Tesla P40 (Compute 6.1) supports neither bf16 nor fast fp16; "
            "all ranks use one dtype",
        ),
        ([CPU, CPU], "fp32: the ranks compute on CPUs, which rarely gain from bf16"),
        ([A100, CPU], "fp32: rank 1 computes on a CPU; all ranks use one dtype"),
    ],
)
def test_the_weakest_card_decides_and_is_named(
    of_ranks: list[PrecisionSupport], reason: str
) -> None:
    choice = choose_precision("auto", of_ranks)
    assert choice.reason == reason
    assert choice.value.name == reason[:4]
    assert choice.value.needs_scaler == (choice.value.name == "fp16")


def test_what_was_asked_for_is_used_where_it_can_be(snapshot: SnapshotAssertion) -> None:
    assert choose_precision("bf16", [CPU]).value.compute is torch.bfloat16
    assert choose_precision("fp32", [A100]).reason == "fp32: requested"
    with pytest.raises(Impossible) as refusal:
        choose_precision("bf16", [A100, T4])
    assert "rank 1's Tesla T4" in refusal.value.what
    assert refusal.value == snapshot
    with pytest.raises(Impossible, match="'half'") as refusal:
        choose_precision("half", [CPU])
    assert refusal.value == snapshot


def test_a_cpu_is_seen_as_one_and_autocast_computes_in_the_type() -> None:
    world = made_up_world()
    assert precision_support(world) == [CPU]
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with choose_precision(name, [CPU]).value.autocast(world.device):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
