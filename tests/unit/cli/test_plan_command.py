"""``muster plan``: what it asks, shows and refuses; forecasts are made up, so nothing is traced."""

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from made_up_plans import MadeUpModel, hardware
from torchmuster.cli import plan as command
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.devices import snapshot
from torchmuster.devices.model import Device, DeviceKind, Node
from torchmuster.errors import Impossible
from torchmuster.plan.hardware import here
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.units import GiB
from typed_options import options_from

Plan = Callable[..., int]


class NoTracer:
    """Stands for the tracer: every trace is made up at once."""

    model: MadeUpModel

    def __init__(self, *, say: object) -> None:
        pass

    def __enter__(self) -> "NoTracer":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def trace(self, request: TraceRequest) -> TraceRecord:
        """Return a made-up record."""
        return self.model.trace(request)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    NoTracer.model = MadeUpModel()
    monkeypatch.setattr(command, "Tracer", NoTracer)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> int:
        return int(command.run(options_from(command.PlanOptions, *words)))

    return call


MODEL = ("--set", "model.build=made_up:model", "--sequence-length", "1024")


def test_one_screen_says_what_to_do(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*MODEL, "--hardware", "8xH100") == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 20
    assert shown[0].startswith("chosen  fsdp over 8 GPUs")
    line = shlex.split(shown[-1])
    assert line[:2] == ["muster", "train"]
    assert "distributed.strategy=fsdp" in line
    assert "model.build=made_up:model" in line
    assert plan(*MODEL, "--hardware", "8xH100", "--details") == 0
    assert "activations" in capsys.readouterr().out


def settings_of_line(line: str) -> dict[str, str]:
    """Return what the command that trains sets."""
    words = shlex.split(line)
    pairs = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    return dict(pair.split("=", 1) for pair in pairs)


def test_the_command_is_one_that_train_takes(
    plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("train: {learning_rate: 3e-4}\ndata: {dataset: 'a:b'}\n")
    assert plan("--config", "c.yaml", *MODEL, "--hardware", "4x8xH100") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "--config c.yaml" in line
    flags = [
        Flag(flag="--set", path=path, text=text) for path, text in settings_of_line(line).items()
    ]
    settings = resolve_settings(file=tmp_path / "c.yaml", flags=flags).settings
    assert settings.model.build == "made_up:model"
    assert settings.distributed.strategy == "fsdp"
    assert settings.distributed.fsdp_sharding_strategy == "hybrid_shard"
    assert settings.train.global_batch_size == 32 * (settings.train.micro_batch_size or 0)


def test_json_has_everything(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*MODEL, "--hardware", "8xH100", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is True
    chosen = document["chosen"]["value"]["candidate"]
    assert chosen["strategy"] == "fsdp"
    size = chosen["micro_batch_size"]
    assert document["settings"]["train.micro_batch_size"] == str(size)


def test_what_a_file_sets_is_fixed(
    plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fixed = "train: {micro_batch_size: 2, activation_checkpointing: full}\n"
    (tmp_path / "c.yaml").write_text(fixed)
    assert plan(*MODEL, "--config", "c.yaml", "--hardware", "8xH100", "--json") == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]["value"]["candidate"]
    assert (chosen["micro_batch_size"], chosen["recompute"]) == (2, "full")


def test_on_the_cpu_of_this_machine_the_line_has_its_ranks(
    plan: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    NoTracer.model.parameters = 10_000_000
    NoTracer.model.sample_gib = 0.01

    def of_settings(settings: object, *, ranks: int | None) -> Hardware:
        found = hardware(cards=ranks or 1)
        return dataclasses.replace(found, card=dataclasses.replace(found.card, kind="cpu"))

    monkeypatch.setattr(here, "hardware_here", of_settings)
    assert plan(*MODEL, "--ranks", "2") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "muster train --device cpu --ranks 2 " in line
    assert "train.precision=fp32" in line
    with pytest.raises(Impossible, match="--find-batch-size needs a GPU"):
        plan(*MODEL, "--ranks", "2", "--find-batch-size")


REFUSED = {
    "no model": ((), "no model", "--model"),
    "no batch": (("--set", "model.build=a:b"), "shape of a batch", "data.dataset=module:function"),
    "--find-batch-size": ((*MODEL, "--find-batch-size"), "--find-batch-size", "leave out one"),
    "--ranks": ((*MODEL, "--ranks", "2"), "--ranks", "leave out one"),
    "--num-gpus": ((*MODEL, "--num-gpus", "2"), "--num-gpus", "leave out one"),
    "--gpu-ids": ((*MODEL, "--gpu-ids", "0,1"), "--gpu-ids", "leave out one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_before_anything_is_traced(plan: Plan, name: str) -> None:
    words, what, fix = REFUSED[name]
    with pytest.raises(Impossible, match=what) as refused:
        plan(*words, "--hardware", "8xH100")
    assert fix in refused.value.fix
    assert not NoTracer.model.traced


@pytest.fixture
def eight_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has eight L4."""
    cpu = Device(
        kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="A processor", total_bytes=512 * GiB
    )
    cards = tuple(
        Device(
            kind=DeviceKind.CUDA, index=at, uuid=f"GPU-{at}", name="NVIDIA L4", total_bytes=22 * GiB
        )
        for at in range(8)
    )
    machine = Node(hostname="m", taken_unix_s=0.0, accelerators=cards, cpu=cpu)
    monkeypatch.setattr(snapshot, "take_snapshot", lambda: machine)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("eight_cards")
def test_a_plan_for_named_gpus_is_one_that_train_takes(
    plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    NoTracer.model.parameters = 100_000_000
    (tmp_path / "c.yaml").write_text("distributed: {gpu_ids: [2, 3, 5]}\n")
    for flags in (("--gpu-ids", "2,3"), ("--num-gpus", "2"), ()):
        assert plan(*MODEL, "--config", "c.yaml", "--json", *flags) == 0
        document = json.loads(capsys.readouterr().out)
        cards = 2 if flags else 3
        assert document["request"]["hardware"]["cards_per_machine"] == cards
        assert document["settings"]["distributed.num_gpus"] == str(cards)
        assert document["settings"]["distributed.gpu_ids"] == "2,3,5"[: 2 * cards - 1]
    assert plan(*MODEL, "--config", "c.yaml", "--hardware", "8xH100", "--json") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["distributed.num_gpus"] == "8"
    assert settings["distributed.gpu_ids"] == "null"


def test_transformers_is_missed_before_a_trace(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Impossible, match="transformers is not installed") as refused:
        plan("--model", "owner/name", "--sequence-length", "64", "--hardware", "8xH100")
    assert "pip install" in refused.value.fix
    assert not NoTracer.model.traced
