"""The question: what settings fix, and what cannot be planned."""

import dataclasses

import pytest

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


def card(*types: str) -> Gpu:
    """Return a GPU that is fast in some dtypes, or whose rates are unknown."""
    rates = dict.fromkeys(types, 1e13)
    return Gpu(name="Novelty", memory_bytes=8 * GiB, flops=rates, bandwidth_bytes_s=None)


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
def test_precision_is_what_a_training_would_choose(types: tuple[str, ...], chosen: str) -> None:
    found = asked(card(*types)).precision
    assert found.value == chosen
    assert "Novelty" in found.reason


def test_a_requested_precision_is_refused_only_if_the_card_is_known_not_to_have_it() -> None:
    for without in (catalogue.known_gpu("T4"), card("float16", "float32")):
        with pytest.raises(
            Impossible, match=f"bf16 was requested, but {without.name} does not support bf16"
        ):
            asked(without, train__precision="bf16")
    assert asked(card(), train__precision="bf16").precision.reason == "bf16: requested"
    for named in ("fp16", "fp32"):
        assert asked(card("float32"), train__precision=named).precision.value == named


def test_a_given_micro_batch_size_is_fixed() -> None:
    assert asked(CARD, train__micro_batch_size="4").micro_batch_size == 4
