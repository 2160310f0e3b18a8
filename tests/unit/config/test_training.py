"""Settings that contradict each other, or say too little to train: all told at once, with their places."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import Resolved, resolve_settings
from torchmuster.config.training import check_trainable, checkpoint_place
from torchmuster.config.written import settings_arguments, settings_yaml
from torchmuster.errors import ConfigError

GOOD = "model: {model_name_or_path: m}\ndata: {files: a.txt}\n"


def read(folder: Path, text: str) -> Resolved:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return resolve_settings(file=path)


def told(folder: Path, text: str) -> list[str]:
    """Return each mistake in one line, without the folder."""
    resolved = read(folder, text)
    try:
        check_trainable(resolved, file="c.yaml")
    except ConfigError as error:
        lines = [f"{one.where}: {one.what}; {one.fix}" for one in error.mistakes]
        return [line.replace(f"{folder}/", "") for line in lines]
    return []


def places(lines: list[str]) -> list[str]:
    return [line.partition(": ")[0] for line in lines]


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "model: {build: 'a:b'}\ndata: {dataset: 'a:c', evaluation: 'a:d'}\n"
        "train: {evaluate_every: 5, steps: 10}",
        "model: {build: 'a:b'}\ndata: {hugging_face: x, options: {split: test}, tokenizer: bytes}",
        GOOD + "train: {epochs: 2, micro_batch_size: 4, global_batch_size: 6}",
        GOOD + "distributed: {enabled: false, num_gpus: 1}",
        GOOD + "checkpoint: {every: 20}",
        GOOD + "checkpoint: {every: 1.5h, keep: 1, folder: 's3://a/b'}",
    ],
)
def test_what_can_be_trained(text: str, tmp_path: Path) -> None:
    assert told(tmp_path, text) == []


def test_everything_that_contradicts_is_told_at_once_with_its_place(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    text = """\
distributed: {enabled: false, num_gpus: 4}
model:
  model_name_or_path: m
  build: a:b
data:
  dataset: a:c
  files: x.txt
train:
  epochs: 1
  steps: 10
  warmup: 110%
checkpoint:
  every: often
  keep_best: true
"""
    found = told(tmp_path, text)
    assert places(found) == [
        "c.yaml",
        "c.yaml:4:10",
        "c.yaml:7:10",
        "c.yaml:10:10",
        "c.yaml:14:14",
        "c.yaml:11:11",
        "c.yaml:13:10",
        "c.yaml:1:41",
    ]
    assert found == snapshot


@pytest.mark.parametrize(
    "text",
    [GOOD, "model: {build: 'a:b'}\ndata: {dataset: 'a:c'}\n"],
    ids=["by name", "own"],
)
def test_the_settings_a_run_leaves_start_another(text: str, tmp_path: Path) -> None:
    resolved = read(tmp_path, text)
    again = settings_yaml(resolved)
    assert told(tmp_path, again) == []
    read_again = read(tmp_path, again)
    assert read_again.settings == resolved.settings
    words = [
        word.partition("=") for word in settings_arguments(read_again, read_again.sources)[1::2]
    ]
    flags = [Flag(flag="--set", path=path, text=text) for path, _, text in words]
    assert (
        resolve_settings(flags=flags).settings == resolved.settings
    )  # and so do the ranks read it


def test_what_names_no_function_is_told_with_the_rest(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    text = "model: {build: mine.model, loss: mse}\ndata: {dataset: 'a:', evaluation: ':b'}\n"
    found = told(tmp_path, text)
    assert places(found) == ["c.yaml:1:16", "c.yaml:1:34", "c.yaml:2:17", "c.yaml:2:35"]
    assert found == snapshot


TRICKY = """\
experiment_name: "a: b # c\\u0085\\n'\\"😀"
distributed: {gpu_ids: [0, "0:1"]}
model: {build: "null", lora: {r: 4, target_modules: ["*", "a, b"]}}
data: {files: "*.txt #1"}
train: {learning_rate: 3e-4, activation_checkpointing: 2, clip_norm: null}
"""


def test_settings_that_are_passed_on_as_words_arrive(tmp_path: Path) -> None:
    resolved = read(tmp_path, TRICKY.replace('"null"', '"a:b"'))
    words = settings_arguments(resolved, resolved.sources)
    assert words[::2] == ["--set"] * (len(words) // 2)
    parts = [word.partition("=") for word in words[1::2]]
    assert {path for path, _, _ in parts} == {
        *("experiment_name", "distributed.gpu_ids", "model.build", "model.lora"),
        *("data.files", "train.learning_rate", "train.activation_checkpointing", "train.clip_norm"),
    }
    again = resolve_settings(
        flags=[Flag(flag="--set", path=path, text=text) for path, _, text in parts]
    )
    assert again.settings == resolved.settings


def test_secrets_are_not_written_down(tmp_path: Path) -> None:
    token = "hf_" + "a" * 30
    resolved = read(tmp_path, f"data: {{files: 'https://u:{token}@host/x'}}")
    assert token not in settings_yaml(resolved)


@pytest.mark.parametrize("every", ["0min", "often", "5 y"])
def test_a_time_between_checkpoints_that_is_none(
    every: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (line,) = told(tmp_path, GOOD + f"checkpoint: {{every: {every}}}")
    assert places([line]) == ["c.yaml:3:21"]
    assert line == snapshot


def test_each_run_has_a_place_of_its_own_for_checkpoints(tmp_path: Path) -> None:
    def place(text: str) -> str | None:
        settings = read(tmp_path, text).settings
        return checkpoint_place(settings.checkpoint, Path("/runs/one"))

    assert place("") == "/runs/one/checkpoints"
    assert place("checkpoint: {folder: 's3://a/b/'}") == "s3://a/b/one"
    assert place("checkpoint: {every: never}") is None


def test_settings_of_lora_that_cannot_be(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    text = """\
model:
  build: a:b
  lora: {rank: 4}
  load_in_4bit: true
data: {dataset: "a:c"}
"""
    found = told(tmp_path, text)
    assert places(found) == ["c.yaml:3:9", "c.yaml:4:17"]
    alone = """\
model:
  model_name_or_path: m
  load_in_4bit: true
data: {dataset: "a:c"}
"""
    without_lora = told(tmp_path, alone)
    assert places(without_lora) == ["c.yaml:3:17"]
    assert [*found, *without_lora] == snapshot


EVALUATED = GOOD.replace("files: a.txt", "files: a.txt, evaluation: b.txt")


@pytest.mark.parametrize(
    "text",
    [
        GOOD + "train: {optimizer: 'mine:make', warmup: 10%}",
        GOOD + "train: {schedule: cosine}",
        EVALUATED + "checkpoint: {keep_best: true}",
    ],
)
def test_optimizers_schedules_and_the_best_checkpoint(text: str, tmp_path: Path) -> None:
    assert told(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD + "train: {optimizer: adam}", "adamw"),
        (GOOD + "train: {warmup: 130%}", "train.warmup"),
        (GOOD + "checkpoint: {keep_best: true}", "data.evaluation"),
        (GOOD.replace("a.txt", "a.txt, columns: {txt: body}"), "did you mean text?"),
    ],
)
def test_one_mistake_is_told(text: str, named: str, tmp_path: Path) -> None:
    [line] = told(tmp_path, text)
    assert named in line
