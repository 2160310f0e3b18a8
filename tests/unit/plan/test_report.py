"""A plan on one screen: the choice and its band first; the details and JSON have everything."""

import json

import pytest

from made_up_plans import MadeUpModel, hardware, question
from torchmuster.plan.report import plan_json, plan_text, short_number
from torchmuster.plan.search import make_plan

ANSWER = make_plan(question(hardware()), MadeUpModel(sample_gib=30).trace)


def test_choice_and_band_are_in_the_first_three_of_at_most_twenty_lines() -> None:
    lines = plan_text(ANSWER, line="muster train").splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith("chosen  fsdp over 8 GPUs, micro-batch ")
    assert "(band " in lines[0]
    assert lines[1].startswith("speed   rough: ")
    assert "tokens/s (band " in lines[1]
    assert lines[-1] == "  muster train"


def test_details_have_the_parts_of_the_memory_and_their_sources() -> None:
    text = plan_text(ANSWER, line="muster train", details=True)
    for words in ("activations", "x tensors", "NCCL", "skipped ddp: "):
        assert words in text


def test_json_has_everything() -> None:
    document = json.loads(json.dumps(plan_json(ANSWER, line="muster train", settings={"a": "b"})))
    assert document["fits"] is True
    chosen = document["chosen"]["value"]
    assert chosen["candidate"]["strategy"] == "fsdp"
    assert chosen["memory"]["low_bytes"] < chosen["memory"]["high_bytes"]
    assert document["settings"] == {"a": "b"}


@pytest.mark.parametrize(
    ("amount", "text"), [(0.0123, "0.012"), (58_761, "59,000"), (8.03e9, "8.03 B"), (1.0, "1")]
)
def test_forecasts_have_two_digits(amount: float, text: str) -> None:
    assert short_number(amount) == text
