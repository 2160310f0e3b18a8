"""``muster plan``: what it asks, shows, writes and refuses; forecasts are made up, so nothing is traced."""

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_plans import MadeUpModel, hardware
from torchmuster.cli import plan as command
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

    def __init__(self, *, cache: Path | None, say: object) -> None:
        self.cache = cache

    def __enter__(self) -> "NoTracer":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def records(self, requests: list[TraceRequest]) -> list[TraceRecord]:
        """Return made-up records."""
        return self.model.trace(requests)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    NoTracer.model = MadeUpModel()
    monkeypatch.setattr(command, "Tracer", NoTracer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> int:
        return int(command.run(options_from(command.PlanOptions, *words)))

    return call


MODEL = ("--build", "made_up:model", "--sequence-length", "1024")


def test_one_screen_says_what_to_do(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*MODEL, "--dataset", "a:b", "--hardware", "8xH100") == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 20
    assert shown[0].startswith("chosen  fsdp over 8 GPUs")
    line = shlex.split(shown[-1])
    assert line[:2] == ["muster", "train"]
    assert "distributed.strategy=fsdp" in line
    assert "model.build=made_up:model" in line
    assert plan(*MODEL, "--hardware", "8xH100", "--details") == 0
    assert "activations" in capsys.readouterr().out


def test_the_written_settings_are_ones_that_train_takes(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("train: {learning_rate: 3e-4}\ndata: {dataset: 'a:b'}\n")
    words = ("--config", "c.yaml", "--build", "made_up:model", "--hardware", "4x8xH100")
    assert plan(*words, "--write", "plan.yaml") == 0
    settings = resolve_settings(file=tmp_path / "plan.yaml").settings
    assert settings.train.learning_rate == 3e-4
    assert settings.model.build == "made_up:model"
    assert settings.distributed.strategy == "fsdp"
    assert settings.distributed.fsdp_sharding_strategy == "hybrid_shard"
    assert settings.train.global_batch_size == 32 * (settings.train.micro_batch_size or 0)
    assert "# muster plan" in (tmp_path / "plan.yaml").read_text()


def test_json_has_everything(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*MODEL, "--hardware", "8xH100", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is True
    assert document["chosen"]["name"] == "fsdp"
    size = document["chosen"]["candidate"]["micro_batch_size"]
    assert document["settings"]["train.micro_batch_size"] == str(size)


def test_what_a_file_fixes_is_fixed_and_defaults_that_it_writes_out_are_not(
    plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fixed = "train: {micro_batch_size: 2, activation_checkpointing: full}\n"
    (tmp_path / "c.yaml").write_text(fixed)
    assert plan(*MODEL, "--config", "c.yaml", "--hardware", "8xH100", "--json") == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]["candidate"]
    assert (chosen["micro_batch_size"], chosen["recompute"]) == (2, "full")
    (tmp_path / "c.yaml").write_text("train: {activation_checkpointing: none}\n")
    NoTracer.model.sample_gib = 300.0
    assert plan(*MODEL, "--config", "c.yaml", "--hardware", "8xH100", "--json") == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["candidate"]["recompute"] == "full"


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


def test_what_cannot_be_had_is_refused_before_anything_is_traced(
    plan: Plan, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as refused:
        plan("--hardware", "8xH100")
    assert refused.value == snapshot(name="no model")
    with pytest.raises(Impossible) as refused:
        plan("--build", "a:b", "--hardware", "8xH100")
    assert "--dataset module:function" in refused.value.fix
    assert refused.value == snapshot(name="no batch")
    with pytest.raises(Impossible, match="--find-batch-size") as refused:
        plan(*MODEL, "--hardware", "8xH100", "--find-batch-size")
    assert refused.value == snapshot(name="--find-batch-size")
    assert not NoTracer.model.traced


def test_files_that_could_not_be_written_are_refused_first(
    plan: Plan, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    on = (*MODEL, "--hardware", "8xH100")
    with pytest.raises(Impossible, match=r"nowhere/p\.yaml") as refused:
        plan(*on, "--write", "nowhere/p.yaml")
    assert refused.value == snapshot(name="no folder")
    (tmp_path / "folder").mkdir()
    with pytest.raises(Impossible) as refused:
        plan(*on, "--write", "folder")
    assert refused.value == snapshot(name="--write is a folder")
    text = "# mine\ntrain: {learning_rate: 3e-4}\n"
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(Impossible, match="--config") as refused:
        plan(*on, "--config", "c.yaml", "--write", "./c.yaml")
    assert refused.value == snapshot(name="would overwrite")
    assert (tmp_path / "c.yaml").read_text() == text
    assert not NoTracer.model.traced


def test_flags_of_this_machine_contradict_other_hardware(
    plan: Plan, snapshot: SnapshotAssertion
) -> None:
    for flags in (("--ranks", "2"), ("--num-gpus", "2"), ("--gpu-ids", "0,1")):
        with pytest.raises(Impossible, match=flags[0]) as refused:
            plan(*MODEL, "--hardware", "8xH100", *flags)
        assert refused.value == snapshot(name=flags[0])


def test_a_model_s_folder_is_looked_for_first(
    plan: Plan, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    on = ("--sequence-length", "1024", "--hardware", "8xH100")
    with pytest.raises(Impossible, match=r"\./nothere") as refused:
        plan("--model", "./nothere", *on)
    assert refused.value == snapshot
    (tmp_path / "empty").mkdir()
    with pytest.raises(Impossible, match="empty") as refused:
        plan("--model", "empty", *on)
    assert "config.json" in refused.value.why
    assert refused.value == snapshot
    assert not NoTracer.model.traced
    assert plan("--model", "owner/name", *on) == 0


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
    words = ("--config", "c.yaml", "--write", "plan.yaml", "--json")
    for flags in (("--gpu-ids", "2,3"), ("--num-gpus", "2"), ()):
        assert plan(*MODEL, *words, *flags) == 0
        document = json.loads(capsys.readouterr().out)
        cards = 2 if flags else 3
        assert document["hardware"]["name"] == f"{cards} x L4"
        # Read as muster train reads it: what does not fit together is refused there.
        distributed = resolve_settings(file=tmp_path / "plan.yaml").settings.distributed
        assert distributed.num_gpus == cards
        assert distributed.gpu_ids == (2, 3, 5)[:cards]
        assert document["settings"]["distributed.gpu_ids"] == "2,3,5"[: 2 * cards - 1]
    assert plan(*MODEL, "--config", "c.yaml", "--hardware", "8xH100", "--write", "plan.yaml") == 0
    distributed = resolve_settings(file=tmp_path / "plan.yaml").settings.distributed
    assert (distributed.num_gpus, distributed.gpu_ids) == (8, None)


def test_transformers_is_missed_before_a_trace(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Impossible, match="transformers is not installed") as refused:
        plan("--model", "owner/name", "--sequence-length", "64", "--hardware", "8xH100")
    assert "pip install" in refused.value.fix
    assert not NoTracer.model.traced


def test_a_line_without_data_says_what_it_lacks(
    plan: Plan, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    assert plan(*MODEL, "--hardware", "8xH100") == 0
    shown = capsys.readouterr().out
    assert "distributed.num_gpus=8" in shown.splitlines()[-1]
    assert plan(*MODEL, "--hardware", "8xH100", "--json") == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["no-data"] == snapshot
    assert plan(*MODEL, "--dataset", "a:b", "--hardware", "2x8xH100") == 0
    assert "2 machines:" in capsys.readouterr().out
    assert plan(*MODEL, "--dataset", "a:b", "--hardware", "2x8xH100", "--json") == 0
    assert "no-data" not in capsys.readouterr().out
