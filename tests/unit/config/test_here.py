"""What settings name and this machine does not have: all told at once, with nothing imported."""

import sys
from pathlib import Path

import pytest

from torchmuster.config.here import check_here
from torchmuster.config.resolve import resolve
from torchmuster.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_here.py").write_text("raise SystemExit('was imported')")
    (tmp_path / "package_of_here" / "inner").mkdir(parents=True)
    (tmp_path / "package_of_here" / "inner" / "data.py").write_text("")
    (tmp_path / "llama").mkdir()
    (tmp_path / "a.txt").write_text("")
    return tmp_path


def told(folder: Path, text: str) -> list[str]:
    (folder / "c.yaml").write_text(text)
    try:
        check_here(resolve(file=Path("c.yaml")))
    except ConfigError as error:
        return [f"{one.where}: {one.what}" for one in error.mistakes]
    return []


@pytest.mark.parametrize(
    "text",
    [
        "model: {model_name_or_path: ./llama}\ndata: {files: '*.txt', evaluation_files: a.txt}",
        "model: {model_name_or_path: owner/name}\ndata: {files: 's3://bucket/*.jsonl'}",
        "model: {build: 'mine_of_here:make', loss: cross_entropy}\n"
        "data: {dataset: 'package_of_here.inner.data:make', evaluation_dataset: 'json.decoder:make'}",
        "data: {files: llama}",
    ],
)
def test_what_is_here_or_cannot_be_told_from_here(text: str, folder: Path) -> None:
    assert told(folder, text) == []
    assert "mine_of_here" not in sys.modules


def test_all_that_is_missing_is_told_with_its_place(folder: Path) -> None:
    text = """\
model:
  model_name_or_path: ./lama
  loss: package_of_here.outer:loss
data:
  files: data/*.txt
  evaluation_files: b.txt
  dataset: mine_of_hre:make
"""
    no_module = f"it is neither in {folder} nor installed"
    assert told(folder, text) == [
        f"c.yaml:5:10: data.files is 'data/*.txt', and there is no such file in {folder}",
        f"c.yaml:6:21: data.evaluation_files is 'b.txt', and there is no such file in {folder}",
        f"c.yaml:2:23: there is no folder './lama' with a model; looked for it in {folder}",
        "c.yaml:3:9: model.loss is 'package_of_here.outer:loss', but there is no module "
        f"'package_of_here.outer': {no_module}",
        "c.yaml:7:12: data.dataset is 'mine_of_hre:make', but there is no module 'mine_of_hre': "
        f"{no_module}",
    ]


def test_a_sink_whose_library_is_missing_is_told_with_the_line_that_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "wandb").mkdir()  # W&B leaves such a folder where it worked; it is not the library
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (folder / "c.yaml").write_text("metrics: {sinks: [parquet, wandb]}")
    with pytest.raises(ConfigError) as refused:
        check_here(resolve(file=Path("c.yaml")))
    assert [(one.where, one.what, one.fix) for one in refused.value.mistakes] == [
        (
            "c.yaml:1:18",
            "metrics.sinks has parquet, but pyarrow is not installed",
            "pip install 'torchmuster[parquet]'",
        ),
        (
            "c.yaml:1:18",
            "metrics.sinks has wandb, but wandb is not installed",
            "pip install 'torchmuster[wandb]'",
        ),
    ]
