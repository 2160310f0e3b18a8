"""The hash of a base model: the same wherever the files are, and compared on resume."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.checkpoints.base_model import BaseModel, hash_weights, refuse_other_base
from torchmuster.errors import Impossible


def files_in(folder: Path, **contents: str) -> list[Path]:
    folder.mkdir()
    files = [folder / f"{name}.safetensors" for name in contents]
    for file, content in zip(files, contents.values(), strict=True):
        file.write_text(content)
    return files


def test_the_hash_depends_on_names_and_contents_alone(tmp_path: Path) -> None:
    first = files_in(tmp_path / "first", a="1", b="2")
    digest = hash_weights(first)
    assert digest == hash_weights(files_in(tmp_path / "same", a="1", b="2")[::-1])
    assert digest != hash_weights(files_in(tmp_path / "swapped", a="2", b="1"))
    assert digest != hash_weights(files_in(tmp_path / "renamed", a="1", c="2"))
    assert digest != hash_weights(files_in(tmp_path / "longer", a="1", b="2 "))


BASE = BaseModel(name="owner/name", revision="abc", dtype="float32", sha256="1" * 64).as_json()


def test_only_the_files_and_their_dtype_must_be_the_same(snapshot: SnapshotAssertion) -> None:
    refuse_other_base("step-1", None, None)
    refuse_other_base("step-1", None, BASE)
    refuse_other_base("step-1", BASE, {**BASE, "name": "/elsewhere", "revision": None})
    refused = []
    for here in (None, {**BASE, "sha256": "2" * 64}, {**BASE, "dtype": "nf4"}):
        with pytest.raises(Impossible) as error:
            refuse_other_base("step-1", BASE, here)
        refused.append(error.value)
    assert refused == snapshot
