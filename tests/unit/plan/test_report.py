"""What the reports of a plan say beside its figures, over models that are simple sums."""

import dataclasses

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_plans import RATES, MadeUpModel, hardware, question
from torchmuster.plan.answer import Answer
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.planning import make_plan
from torchmuster.plan.report.page import plan_json, plan_page
from torchmuster.plan.report.terminal import plan_table, plan_text
from torchmuster.plan.timing.rates import CATALOGUED, ON_CPU


def planned(
    monkeypatch: pytest.MonkeyPatch, on: Hardware | None = None, *, origin: str = "made up"
) -> Answer:
    model = MadeUpModel().stand_in(monkeypatch)
    answer = make_plan(question(on), model.look, rates=RATES, simulate=False)
    rows = []
    for one in answer.table:
        assert one.time is not None
        rows.append(dataclasses.replace(one, time=dataclasses.replace(one.time, origin=origin)))
    return dataclasses.replace(answer, table=tuple(rows))


def test_how_far_times_may_be_off_is_said_once_beside_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "published runs reached 0.55 to 1.31 times these speeds"
    usual = planned(monkeypatch, origin=CATALOGUED.source)
    assert plan_text(usual, line="").count(said) == 1
    assert plan_page(usual, line="").count(said) == 1
    for other in (ON_CPU.source, "measured on somewhere"):
        assert said not in plan_text(planned(monkeypatch, origin=other), line="")


def test_rows_of_one_way_are_told_apart_by_their_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = planned(monkeypatch, hardware(machines=2))
    one = answer.table[0]
    ways = [
        Candidate(strategy="fsdp", layout=dataclasses.replace(one.candidate.layout, **layout))
        for layout in ({"copies": 1, "shards": 16}, {"copies": 1, "shards": 8})
    ]
    rows = tuple(dataclasses.replace(one, candidate=way) for way in ways)
    _, shown = plan_table(dataclasses.replace(answer, table=rows))
    assert [row[0] for row in shown] == ["fsdp", "fsdp over 8"]


def test_rows_that_a_screen_has_no_room_for_are_counted(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    answer = planned(monkeypatch)
    assert "--json" not in plan_text(answer, line="")
    many = dataclasses.replace(answer, table=answer.table[:1] * 12)
    (rest,) = [line for line in plan_text(many, line="").splitlines() if "--json" in line]
    assert "2 more rows" in rest
    assert rest == snapshot


def test_waiting_for_others_is_said_of_what_is_chosen(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    answer = planned(monkeypatch)
    best = answer.chosen.value
    assert best.time is not None
    time = dataclasses.replace(best.time, compute_s=3.0, step_s=4.0)
    chosen = dataclasses.replace(answer.chosen, value=dataclasses.replace(best, time=time))
    answer = dataclasses.replace(answer, chosen=chosen)
    (said,) = [
        line for line in plan_text(answer, line="").splitlines() if "efficiency 75 %" in line
    ]
    assert said == snapshot
    assert said.removeprefix("scaling ") in plan_page(answer, line="")
    document = plan_json(answer, line="", settings={})
    assert document["chosen"]["scaling_efficiency"] == 0.75
    MadeUpModel(parameters=1_000_000_000).stand_in(monkeypatch)
    alone = planned(monkeypatch, hardware(cards=1, memory_gib=288))
    assert "efficiency" not in plan_text(alone, line="")


def test_a_cpu_has_ranks_and_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    on = hardware(cards=2)
    on = dataclasses.replace(on, card=dataclasses.replace(on.card, kind="cpu", name="a CPU"))
    answer = planned(monkeypatch, on)
    for shown in (plan_text(answer, line=""), plan_page(answer, line="")):
        assert "GPU" not in shown
        assert "rank" in shown
