"""``muster train`` before anything starts: what it refuses and how, and what ``--dry-run`` shows."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster, Result
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.cli.launch_options import TrainOptions
from torchmuster.cli.main import root_parser
from torchmuster.cli.options import read_options
from torchmuster.cli.setting_options import settings_of
from torchmuster.cli.train import job_of

pytestmark = pytest.mark.slow

Train = Callable[..., Result]

CONFIG = """\
experiment_name: tiny
distributed: {strategy: fsdp}
model: {model_name_or_path: llama}
data: {files: "data/*.txt"}
train: {steps: 10, learning_rate: 3e-4, optimizer_options: {betas: [0.9, 0.95]}}
"""


@pytest.fixture
def train(muster: Muster, own_machine: Path) -> Train:
    """Run ``muster train``; whatever it says, nothing may have been made or started."""
    (own_machine / "c.yaml").write_text(CONFIG)
    (own_machine / "data").mkdir()
    (own_machine / "data" / "a.txt").write_text("a")

    def call(*words: str, env: dict[str, str] | None = None) -> Result:
        result = muster("train", *words, env={"COLUMNS": "400", **(env or {})})
        assert not (own_machine / "runs").exists()
        assert "Traceback" not in result.err
        return result

    return call


def dry(train: Train, *words: str, env: dict[str, str] | None = None) -> list[str]:
    """Return the rank's own command, from the module on."""
    done = train("--config", "c.yaml", *words, "--dry-run", env=env)
    assert (done.code, done.err) == (0, "")
    command = shlex.split(done.out.splitlines()[-2])
    return command[command.index("torchmuster.worker") :]


def test_ranks_get_the_given_settings_as_words_and_no_file(train: Train, own_machine: Path) -> None:
    command = dry(train, "--device", "cpu", "--ranks", "2", "--set", "train.seed=7",
                  env={"TORCHMUSTER_TRAIN_CLIP_NORM": "1"})  # fmt: skip
    assert command == [
        "torchmuster.worker",
        *("--set", "experiment_name=tiny"),
        *("--set", "distributed.strategy=fsdp"),
        *("--set", "model.model_name_or_path=llama"),
        *("--set", "data.files=data/*.txt"),
        *("--set", "train.steps=10"),
        *("--set", "train.learning_rate=0.0003"),
        *("--set", 'train.optimizer_options={"betas": [0.9, 0.95]}'),
        *("--set", "train.clip_norm=1.0"),
        *("--set", "train.seed=7"),
        *("--device", "cpu"),
        *("--run-folder", str(own_machine / "runs" / "RUN")),
    ]


def test_gpus_are_chosen_as_for_a_script(
    train: Train, machine: Callable[[Scenario], Path], own_machine: Path
) -> None:
    machine(scenarios.eight_a100())
    done = train("--config", "c.yaml", "--num-gpus", "2", "--dry-run")
    assert done.out.startswith("this host: 2 ranks\n")
    assert "--device" not in done.out


@pytest.mark.parametrize(
    ("words", "theirs", "found"),
    [
        ((), {}, "expandable_segments:True"),
        (("--device", "cpu"), {}, None),
        ((), {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ((), {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ((), {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_the_allocator_of_gpus_is_as_the_planner_has_it_unless_people_say_otherwise(
    words: tuple[str, ...],
    theirs: dict[str, str],
    found: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    parsed = root_parser(only="train").parse_args(["train", *words])
    options = read_options(TrainOptions, parsed, command_line=("train",))
    assert job_of(options, settings_of(options)).environment.get("PYTORCH_ALLOC_CONF") == found


def test_without_settings_all_that_is_missing_is_said(
    train: Train, snapshot: SnapshotAssertion
) -> None:
    done = train()
    assert done.code == 2
    assert done.err.count("failure  ") == 2
    assert done.err == snapshot


def test_mistakes_of_a_file_are_said_with_their_places(
    train: Train, own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    (own_machine / "c.yaml").write_text(CONFIG.replace("steps: 10", "step: 10, lr: 1"))
    done = train("--config", "c.yaml")
    assert done.code == 2
    assert re.findall("^failure  (.*?): ", done.err, re.MULTILINE) == ["c.yaml:5:9", "c.yaml:5:19"]
    assert done.err == snapshot
    (own_machine / "c.yaml").write_text(CONFIG.replace("steps: 10", "steps: 10, epochs: 2"))
    done = train("--config", "c.yaml")
    assert done.code == 2
    assert done.err.startswith("failure  c.yaml:5:16: ")
    assert "c.yaml:5:28" in done.err
    assert done.err == snapshot


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("--set model.device_map=cpu --num-gpus 2", "by model.device_map (--set"),
        ("--set distributed.enabled=false --ranks 2 --device cpu", "distributed.enabled"),
        ("--set distributed.enabled=false --hosts a,b", "distributed.enabled"),
        ("--nodes 2", "--slurm --nodes N\n"),
        ("--device cpu --num-gpus 2", "--ranks 2"),
    ],
)
def test_what_contradicts_is_refused(line: str, fact: str, train: Train) -> None:
    done = train("--config", "c.yaml", *line.split())
    assert done.code == 2
    assert fact in done.err


def test_what_is_not_on_this_machine_is_told_before_anything_starts(
    train: Train, own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    missing = ("--config", "c.yaml", "--set", "data.files=b/*.txt")
    done = train(*missing)
    assert done.code == 2
    assert "'b/*.txt'" in done.err
    assert done.err == snapshot
    assert train(*missing, "--slurm", "--dry-run").code == 0  # it may be there where it runs


def test_a_slurm_job_runs_the_same_command(train: Train) -> None:
    done = train("--config", "c.yaml", "--slurm", "--nodes", "2", "--dry-run")
    assert done.code == 0
    assert " --nodes=2 " in done.out
    assert done.out.endswith("-m torchmuster train --config c.yaml --slurm --nodes 2'\n")
