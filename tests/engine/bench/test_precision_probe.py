"""Trainings in all precisions begin alike, and models that are made to overflow do, where they should."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from made_up_worlds import made_up_world
from torchmuster.bench.precision import PrecisionAnswer, PrecisionRequest
from torchmuster.bench.probes import precision, stability
from torchmuster.errors import Impossible
from torchmuster.plan.job import Work
from torchmuster.train.data.pytree import map_tensors

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OWN = """
import torch
from torch import nn


class Overflows(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.Linear(4, 8)
        self.last = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))
        nn.init.uniform_(self.grow.weight, 3e4, 6e4)

    def forward(self, inputs):
        return self.last(self.grow(inputs))


def overflows():
    return Overflows()


class LargeGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs))) * 100


def large_gradients():
    return LargeGradients()


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.last = nn.Linear(8, 20)

    def forward(self, input_ids):
        return self.last(self.tokens(input_ids))


def reads():
    return Reads()


def fits():
    return nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))


def data():
    return [(torch.ones(4) + 0.1 * n, torch.tensor(n % 2)) for n in range(12)]


def no_data():
    return []
"""


def work_of(folder: Path, model: str, data: str = "data") -> Work:
    name = f"{folder.name.replace('-', '_')}_{model}"  # modules stay imported from test to test
    (folder / f"{name}.py").write_text(OWN)
    return Work(build=f"{name}:{model}", dataset=f"{name}:{data}", folder=str(folder))


def request(work: Work, **changed: object) -> PrecisionRequest:
    told: dict[str, object] = {
        "device": "cpu",
        "work": work,
        "micro_batch_size": 2,
        "steps": 4,
        "rounds": 1,
        "study": False,
        "warm_up_s": 0.0,
    }
    return PrecisionRequest(**{**told, **changed})  # type: ignore[arg-type]


def test_all_precisions_train_the_same_model_with_the_same_data(tmp_path: Path) -> None:
    found = precision.measure_precisions(
        request(work_of(tmp_path, "fits"), micro_batch_size=64), made_up_world()
    )
    ways = {one.precision: one for one in found.ways}
    assert list(ways) == ["fp32", "bf16", "fp16"]
    assert found.missing.keys() == {"tf32"}
    first = [one.losses[0] for one in found.ways]
    assert all(loss == pytest.approx(first[0], rel=1e-2) for loss in first)
    for one in found.ways:
        assert len(one.losses) == 4
        assert one.step_s
        assert not one.trouble
    # Against float64: fp32 has 24 bits, bf16 8.
    plain, half = ways["fp32"].output_error, ways["bf16"].output_error
    assert plain is not None
    assert half is not None
    assert plain < 1e-5
    assert 1e-4 < half < 5e-2
    assert ways["fp16"].scale is not None
    assert found.other_order_loss is not None


@pytest.mark.nightly
def test_what_is_asked_and_answered_is_json(tmp_path: Path) -> None:
    asked = request(work_of(tmp_path, "fits"), steps=1)
    (tmp_path / "request.json").write_bytes(msgspec.json.encode(asked))
    precision.main(str(tmp_path / "request.json"), str(tmp_path))
    answer = msgspec.json.decode((tmp_path / "rank-0.json").read_bytes(), type=PrecisionAnswer)
    assert [one.precision for one in answer.ways] == ["fp32", "bf16", "fp16"]


@pytest.mark.nightly
def test_a_model_that_overflows_in_fp16_is_named_with_its_layer(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    found = precision.measure_precisions(request(work_of(tmp_path, "overflows")), made_up_world())
    ways = {one.precision: one for one in found.ways}
    assert ways["fp16"].skipped == 4
    assert "layer grow returned Inf" in ways["fp16"].trouble
    assert ways["fp16"].trouble == snapshot
    assert ways["bf16"].skipped == 0
    assert not ways["bf16"].trouble


@pytest.mark.nightly
def test_a_step_that_the_loss_scale_spoils_is_taken_again_with_a_smaller_one(
    tmp_path: Path,
) -> None:
    found = precision.measure_precisions(
        request(work_of(tmp_path, "large_gradients")), made_up_world()
    )
    ways = {one.precision: one for one in found.ways}
    assert ways["fp16"].skipped > 0
    assert ways["fp16"].scale is not None
    assert ways["fp16"].scale < 65536
    assert not ways["fp16"].trouble
    # All have learnt as often.
    assert ways["fp16"].held_loss == pytest.approx(ways["fp32"].held_loss, rel=1e-2)


@pytest.mark.nightly
def test_rows_of_text_are_drawn_where_there_is_no_dataset(tmp_path: Path) -> None:
    text = replace(
        work_of(tmp_path, "reads"), dataset=None, sequence_length=8, loss="language_model"
    )
    found = precision.measure_precisions(request(text), made_up_world())
    assert [one.held_loss is not None for one in found.ways] == [True] * 3


def test_the_reference_is_computed_on_the_cpu_wherever_the_batch_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = replace(
        work_of(tmp_path, "reads"), dataset=None, sequence_length=8, loss="language_model"
    )
    built = precision._built(request(text), "fp32", made_up_world())
    batch = map_tensors(built.batch(), lambda one: one.to("meta"))
    monkeypatch.setattr(  # what is on "meta" has no values to copy
        precision,
        "move_to_device",
        lambda batch, device: map_tensors(batch, lambda one: torch.zeros_like(one, device=device)),
    )
    reference = precision._reference(built, batch)
    assert reference is not None
    assert (reference.device.type, reference.dtype) == ("cpu", torch.float64)


def test_a_dataset_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Impossible, match="has no samples"):
        precision.measure_precisions(request(work_of(tmp_path, "fits", "no_data")), made_up_world())


def test_fp16_overflows_where_it_must_and_bf16_survives() -> None:
    courses = {
        (one.case, one.precision): one
        for one in stability.study_stability(made_up_world(), ["fp32", "bf16", "fp16"], 25)
    }
    gradients = courses["large losses", "fp16"]
    assert gradients.skipped
    assert not gradients.in_forward
    assert gradients.culprit.startswith("the output of layers.")
    assert gradients.scales[0] == 32768  # halved after the first step
    assert min(gradients.scales) >= 1
    assert gradients.learnt
    forward = courses["large activations", "fp16"]
    assert len(forward.skipped) == 25  # no scale can mend it
    assert forward.in_forward
    assert forward.kind == "Inf"
    assert forward.culprit.startswith("layers.")
    for case in ("large losses", "large activations"):
        for name in ("fp32", "bf16"):
            assert courses[case, name].learnt
            assert not courses[case, name].skipped
