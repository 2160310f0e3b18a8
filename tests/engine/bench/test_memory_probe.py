"""Memory by stage is what tensors take: against sizes worked out by hand, and against torch's own saved tensors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from live_bytes import live_bytes
from made_up_worlds import made_up_world
from torchmuster.bench.memory import MemoryRequest, StageTaken
from torchmuster.bench.probes import memory
from torchmuster.bench.probes.memory import RecomputeSwitch, followed_stages
from torchmuster.plan.job import Candidate, Recompute, Work
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.live_storage import tensor_memory
from torchmuster.train.strategies.sharding import ShardLayout

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.back(torch.tanh(self.wide(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))

def make():
    return Model()

def samples():
    return [(torch.ones(16), 3)]
"""
SAMPLES = 128
# Linear layers with their biases.
PARAMETERS = (16 * 64 + 64) + 4 * (64 * 256 + 256 + 256 * 64 + 64) + (64 * 10 + 10)
TENSORS = 2 + 4 * 4 + 2
ONE_SAMPLE = 16 * 4  # the dataset's, which stays
ALONE = Candidate(
    strategy="single", layout=ShardLayout(copies=1, shards=1), micro_batch_size=SAMPLES
)


@pytest.fixture
def own(tmp_path: Path) -> Work:
    name = f"models_{tmp_path.name.replace('-', '_')}"  # Python keeps modules by their names
    (tmp_path / f"{name}.py").write_text(MODELS)
    return Work(build=f"{name}:make", dataset=f"{name}:samples", folder=str(tmp_path))


def stages_of(work: Work, candidate: Candidate = ALONE) -> dict[str, StageTaken]:
    with tensor_memory(torch.device("cpu")) as look:
        built = build_step(work, candidate, made_up_world())
        found = followed_stages(built, look)
    return {one.title: one for one in found}


def saved_bytes(built: BuiltStep) -> int:
    """Return what torch keeps from a forward for its backward, with what goes in and comes out."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs, labels = built.batch()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = built.model(inputs)
    for one in (inputs, labels, logits):
        keep(one)
    for one in built.model.parameters():
        kept.pop(one.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def test_each_stage_has_what_can_be_worked_out_by_hand(own: Work) -> None:
    stages = stages_of(own)
    assert list(stages) == [
        "model built",
        *(f"step {n}: {name}" for n in (1, 2) for name in ("forward", "loss", "backward", "optimizer step")),
    ]  # fmt: skip
    weights = 4 * PARAMETERS
    built, backward = stages["model built"], stages["step 1: backward"]
    assert (built.before_bytes, built.after_bytes) == (0, weights + ONE_SAMPLE)
    assert backward.parts["gradients"] == weights
    # AdamW has two moments of each parameter, and the number of its step.
    assert backward.parts["optimizer states"] == 0
    after = stages["step 2: optimizer step"]
    assert after.parts["optimizer states"] == 2 * weights + 4 * TENSORS
    assert (after.parts["parameters"], after.parts["gradients"]) == (weights, 0)
    for before, stage in zip(stages.values(), [*stages.values()][1:], strict=False):
        assert stage.before_bytes == before.after_bytes
        assert stage.peak_bytes >= max(stage.before_bytes, stage.after_bytes)
        assert sum(stage.parts.values()) == stage.after_bytes


def test_after_the_forward_there_is_what_torch_saved_for_the_backward(own: Work) -> None:
    forward = stages_of(own)["step 1: forward"]
    built = build_step(own, ALONE, made_up_world())
    assert forward.parts["activations and others"] == saved_bytes(built) + ONE_SAMPLE
    # By hand: the input, the first layer's result, of each block tanh's and its sum, logits, labels.
    by_hand = SAMPLES * 4 * (16 + 64 + 4 * (256 + 64) + 10) + SAMPLES * 8
    assert forward.parts["activations and others"] == by_hand + ONE_SAMPLE


def test_with_several_micro_batches_gradients_stay_beside_the_second_forward(own: Work) -> None:
    stages = stages_of(own, replace(ALONE, accumulation=2))
    assert stages["step 2: forward"].parts["gradients"] == 0
    assert stages["step 2: forward, micro-batch 2"].parts["gradients"] == 4 * PARAMETERS


@pytest.mark.parametrize("way", ["none", "full", 2])
def test_what_computing_again_saves_is_counted_independently(own: Work, way: Recompute) -> None:
    request = MemoryRequest(work=own, candidate=ALONE, precision="fp32", device="cpu", rounds=1)
    trial = memory._Trial(request, ALONE, made_up_world())
    trial._build()
    measured = trial._peak(way)
    assert measured is not None
    with live_bytes() as counted:  # another follower, from the first parameter on
        trial = memory._Trial(request, ALONE, made_up_world())
        trial._build()
        trial._step(way)
        counted.begin_again()
        trial._step(way)
    assert measured[0] == pytest.approx(counted.peak, rel=0.02)


def test_a_switched_model_computes_the_same_and_is_itself_again(own: Work) -> None:
    model = build_step(own, ALONE, made_up_world()).model
    switch = RecomputeSwitch(model)
    inputs = torch.randn(3, 16)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(inputs).sum().backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    plain = gradients()
    counts = {}
    for way in ("full", 2, "selective", 3):
        switch.use(way)
        counts[way] = switch.count(way)
        for one, other in zip(plain, gradients(), strict=True):
            assert torch.equal(one, other)
    assert counts == {"full": 4, 2: 2, "selective": 4, 3: 1}
    switch.use("none")
    assert not any("forward" in vars(one) for one in model.modules())


def test_what_runs_out_of_memory_is_said_and_the_rest_is_tried(
    own: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = BuiltStep.train

    def scarce(built: BuiltStep, number: int = 0) -> object:
        again = sum("forward" in vars(one) for one in built.blocks)
        if again < 2:
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        return train(built, number)

    monkeypatch.setattr(BuiltStep, "train", scarce)
    trial = memory._Trial(
        MemoryRequest(work=own, candidate=ALONE, precision="fp32", device="cpu", rounds=1),
        ALONE,
        made_up_world(),
    )
    trial._build()
    monkeypatch.setattr(memory, "_WARM_UP_S", 0.0)
    found = {one.recompute: one for one in trial.ways()}
    assert [way for way, one in found.items() if one.peak_bytes is None] == [3, "none"]
    assert all(bool(one.step_s) is (one.peak_bytes is not None) for one in found.values())


def test_a_whole_measurement_has_two_precisions_and_all_ways(
    own: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_WARM_UP_S", 0.0)
    request = MemoryRequest(work=own, candidate=ALONE, precision="auto", device="cpu", rounds=2)
    answer = memory.measure_stages(request, made_up_world())
    assert (answer.precision, [one.precision for one in answer.stages]) == (
        "fp32",
        ["fp32", "bf16"],
    )
    assert (answer.blocks, answer.parameter_count) == (4, PARAMETERS)
    peaks = {one.recompute: one.peak_bytes for one in answer.ways}
    assert list(peaks) == ["full", 2, 3, "selective", "none"]
    assert peaks["full"] < peaks[2] < peaks[3] < peaks["none"]  # type: ignore[operator]
    highest = answer.stages[0].highest
    assert highest is not None
    assert highest.peak_bytes == pytest.approx(peaks["none"], rel=0.01)
    assert all(len(one.step_s) == 2 for one in answer.ways)


def test_a_model_without_repeated_layers_has_its_stages(tmp_path: Path) -> None:
    name = f"models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "def make():\n    return torch.nn.Linear(4, 2)\n"
        "def samples():\n    return [(torch.ones(4), 1)]\n"
    )
    work = Work(build=f"{name}:make", dataset=f"{name}:samples", folder=str(tmp_path))
    request = MemoryRequest(work=work, candidate=ALONE, precision="fp32", device="cpu", rounds=1)
    answer = memory.measure_stages(request, made_up_world())
    assert (answer.blocks, [one.recompute for one in answer.ways]) == (0, ["none"])
    assert isinstance(build_step(work, ALONE, made_up_world()).model, nn.Linear)
