"""The plans for thirty situations, with their reasons, from traces that were recorded; no torch is needed.

``python tests/plan_situations.py`` traces what is missing and writes the answers down again.
"""

import dataclasses

import pytest

from plan_situations import (
    ANSWERS,
    FOLDER,
    SITUATIONS,
    Missing,
    Situation,
    answer_in_words,
    recorded,
)
from torchmuster.errors import Impossible
from torchmuster.plan.planning import make_plan
from torchmuster.plan.search.pruning import SAME_RATE
from torchmuster.plan.timing.rates import usual_rates
from torchmuster.units import GiB


@pytest.fixture(autouse=True)
def where_the_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


def test_every_situation_has_an_answer() -> None:
    missing = [one.name for one in SITUATIONS if one.name not in ANSWERS]
    assert not missing, "python tests/plan_situations.py"


@pytest.mark.parametrize(
    "situation", [one for one in SITUATIONS if one.name in ANSWERS], ids=lambda one: one.name
)
def test_the_plan_and_its_reason(situation: Situation) -> None:
    assert answer_in_words(situation, recorded) == ANSWERS[situation.name]


@pytest.mark.parametrize("model", sorted({one.model for one in SITUATIONS if "8x" in one.hardware}))
def test_more_memory_never_makes_a_plan_slower(model: str) -> None:
    """Where a way was not recorded, as no card of a situation would take it, nothing is said."""
    situation = next(one for one in SITUATIONS if one.model == model and "8x" in one.hardware)
    asked = situation.asked()
    before = 0.0
    for memory_gib in (40, 60, 80, 100, 141, 180):
        card = dataclasses.replace(asked.hardware.card, memory_bytes=memory_gib * GiB)
        hardware = dataclasses.replace(asked.hardware, card=card)
        try:
            wished = dataclasses.replace(asked, hardware=hardware)
            answer = make_plan(wished, recorded, rates=usual_rates("cuda"), simulate=False)
        except Missing:
            continue
        except Impossible:
            assert before == 0.0, f"{memory_gib} GiB do not fit any more"
            continue
        rate = answer.chosen.value.samples_per_s or 0.0
        assert rate * SAME_RATE >= before
        before = max(rate, before)
