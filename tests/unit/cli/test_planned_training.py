"""``muster train --plan``: the flags of a training and its plan agree, whatever devices were asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from made_up_plans import MadeUpModel
from torchmuster.cli import planned_training, train
from torchmuster.cli.launch_options import TrainOptions
from torchmuster.cli.setting_options import settings_of
from torchmuster.config.resolve import Resolved
from torchmuster.devices import snapshot
from torchmuster.devices.model import Device, DeviceKind, Node
from torchmuster.errors import ConfigError
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.units import GiB
from typed_options import options_from

Follow = Callable[..., tuple[TrainOptions, Resolved]]
CPU = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="A processor", total_bytes=512 * GiB)
CARDS = tuple(
    Device(kind=DeviceKind.CUDA, index=at, uuid=f"GPU-{at}", name="NVIDIA L4", total_bytes=22 * GiB)
    for at in range(8)
)


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Follow:
    """Follow a plan with made-up forecasts on a machine with eight cards."""
    model = MadeUpModel(parameters=100_000_000, sample_gib=0.1)

    class NoTracer:
        def __init__(self, **_: object) -> None:
            pass

        def __enter__(self) -> "NoTracer":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def records(self, requests: list[TraceRequest]) -> list[TraceRecord]:
            return model.trace(requests)

    machine = Node(hostname="m", taken_unix_s=0.0, accelerators=CARDS, cpu=CPU)
    monkeypatch.setattr(planned_training, "Tracer", NoTracer)
    monkeypatch.setattr(snapshot, "take_snapshot", lambda: machine)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    (tmp_path / "c.yaml").write_text("model: {build: 'own:model'}\ndata: {dataset: 'own:data'}\n")

    def call(*words: str) -> tuple[TrainOptions, Resolved]:
        typed = ("--config", "c.yaml", "--plan", *words)
        options = options_from(TrainOptions, *typed, command_line=("train",))
        options, _ = planned_training.follow_plan(options, settings_of(options))
        return options, settings_of(options)

    return call


@pytest.mark.parametrize(
    ("words", "count", "ids"),
    [
        ((), 8, None),
        (("--gpu-ids", "2", "3"), 2, (2, 3)),
        (("--num-gpus", "4"), 4, None),
        (("--ranks", "4"), 4, None),
        (("--gpu-ids", "2", "3", "--set", "distributed.enabled=false"), 1, (2,)),
    ],
)
def test_a_plan_is_for_the_gpus_that_were_asked_for(
    follow: Follow, words: tuple[str, ...], count: int, ids: tuple[int, ...] | None
) -> None:
    options, resolved = follow(*words)
    assert resolved.settings.distributed.num_gpus == count
    assert resolved.settings.distributed.gpu_ids == ids
    spec = train._job(options, resolved)  # refuses what does not fit together
    assert (spec.device, spec.ranks) == ("gpu", count)
    assert spec.gpu_ids == (None if ids is None else tuple(map(str, ids)))


def test_on_the_processor_the_ranks_are_those_of_the_plan(follow: Follow) -> None:
    options, resolved = follow("--device", "cpu", "--ranks", "2")
    assert train._job(options, resolved).ranks == 2
    assert resolved.settings.distributed.num_gpus is None
    assert resolved.settings.train.precision == "fp32"


def test_what_is_not_there_is_told_before_a_trace(follow: Follow) -> None:
    with pytest.raises(ConfigError, match="module 'nowhere' is neither"):
        follow("--set", "model.build=nowhere:model")
