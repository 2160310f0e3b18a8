"""The question: what settings fix, and what cannot be planned."""

import dataclasses

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_plans import CARD, hardware
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import Impossible
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Gpu
from torchmuster.plan.request import PlanRequest, request_from_settings
from torchmuster.units import GiB


def asked(card: Gpu, **settings: object) -> PlanRequest:
    texts = {"model.build": "a:b", "data.dataset": "a:c"} | {
        path.replace("__", "."): str(value) for path, value in settings.items()
    }
    flags = [Flag(flag="--set", path=path, text=text) for path, text in texts.items()]
    on = dataclasses.replace(hardware(), card=card)
    return request_from_settings(resolve_settings(flags=flags), on, folder=".")


def unlisted(*types: str, kind: str = "cuda") -> Gpu:
    return Gpu(
        name="Novelty",
        memory_bytes=8 * GiB,
        flops={},
        bandwidth_bytes_s=None,
        kind=kind,
        number_types=types or None,
    )


@pytest.mark.parametrize(
    ("types", "chosen"),
    [
        (("bfloat16", "float16", "float32"), "bf16"),
        (("float16", "float32"), "fp16"),
        (("float32",), "fp32"),
        ((), "bf16"),
    ],
    ids=["all types", "no bfloat16", "float32 only", "unknown types"],
)
def test_precision_is_what_a_training_would_choose_also_without_known_rates(
    types: tuple[str, ...], chosen: str, snapshot: SnapshotAssertion
) -> None:
    found = asked(unlisted(*types)).precision
    assert found.value == chosen
    assert found.reason == snapshot


def test_a_named_precision_needs_no_known_rate(snapshot: SnapshotAssertion) -> None:
    for types in ((), ("bfloat16", "float32")):
        found = asked(unlisted(*types), train__precision="bf16").precision
        assert found.value == "bf16"
        assert found.reason == snapshot
    only = dataclasses.replace(unlisted(), flops={"float32": 1e13}, bandwidth_bytes_s=1e12)
    assert asked(only, train__precision="bf16").precision.reason == snapshot
    assert asked(CARD, train__precision="bf16").precision.reason == "bf16: requested"


def test_what_a_card_is_known_not_to_have_is_refused() -> None:
    for card in (catalogue.known_gpu("T4").card, unlisted("float16", "float32")):
        with pytest.raises(
            Impossible, match=f"bf16 was requested, but {card.name} does not support bf16"
        ):
            asked(card, train__precision="bf16")
    for named in ("fp16", "fp32"):
        found = asked(unlisted("float32"), train__precision=named).precision
        assert found.value == named  # slow, perhaps, but a training takes it
    assert asked(catalogue.known_gpu("T4").card).precision.value == "fp16"
    assert asked(catalogue.known_gpu("L4").card).precision.reason == "bf16: L4 supports it"


def test_a_given_micro_batch_size_is_fixed() -> None:
    assert asked(CARD, train__micro_batch_size="4").micro_batch_size == 4
