"""What settings name and this machine does not have: all told at once, with nothing imported."""

import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.config.here import check_here
from torchmuster.config.resolve import resolve_settings
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
        check_here(resolve_settings(file=Path("c.yaml")))
    except ConfigError as error:
        return [f"{one.where}: {one.what}" for one in error.mistakes]
    return []


@pytest.mark.integrations
@pytest.mark.parametrize(
    "text",
    [
        "model: {model_name_or_path: ./llama}\ndata: {files: '*.txt', evaluation: a.txt}",
        "model: {model_name_or_path: ./llama}\ndata: {files: ['*.txt', 's3://bucket/a.jsonl']}",
        "model: {model_name_or_path: owner/name}\ndata: {files: 's3://bucket/*.jsonl'}",
        "model: {build: 'mine_of_here:make', loss: cross_entropy}\n"
        "data: {dataset: 'package_of_here.inner.data:make', evaluation: 'json.decoder:make'}",
        "data: {files: package_of_here/inner}",
    ],
)
def test_what_is_here_or_cannot_be_told_from_here(text: str, folder: Path) -> None:
    assert told(folder, text) == []
    assert "mine_of_here" not in sys.modules


@pytest.mark.integrations
def test_all_that_is_missing_is_told_with_its_place(
    folder: Path, snapshot: SnapshotAssertion
) -> None:
    text = """\
model:
  model_name_or_path: ./lama
  loss: package_of_here.outer:loss
data:
  files: data/*.txt
  evaluation: b.txt
train:
  optimizer: mine_of_hre:make
"""
    found = told(folder, text)
    assert [line.partition(": ")[0] for line in found] == [
        *("c.yaml:5:10", "c.yaml:6:15", "c.yaml:2:23", "c.yaml:3:9", "c.yaml:8:14")
    ]
    assert [line.replace(str(folder), "FOLDER") for line in found] == snapshot


@pytest.mark.parametrize(
    ("missing", "text", "extra"),
    [
        (["bitsandbytes"], "{model_name_or_path: a/b, lora: {r: 4}, load_in_4bit: true}", "qlora"),
        (["peft"], "{model_name_or_path: a/b, lora: {r: 4}, load_in_4bit: true}", "qlora"),
        (["peft", "bitsandbytes"], "{model_name_or_path: a/b, lora: {r: 4}}", "lora"),
        (["peft"], "{build: 'mine_of_here:make', lora: {r: 4}}", "lora"),
        (["transformers", "peft"], "{model_name_or_path: a/b}", "transformers"),
    ],
)
def test_a_model_whose_libraries_are_missing_is_told_once_with_the_line_that_installs_them(
    missing: list[str], text: str, extra: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    (folder / "c.yaml").write_text(f"model: {text}")
    with pytest.raises(ConfigError) as refused:
        check_here(resolve_settings(file=Path("c.yaml")))
    assert [one.fix for one in refused.value.mistakes] == [f"pip install 'torchmuster[{extra}]'"]
    assert refused.value.exit_code == 2
