"""``muster recipe``: settings files that can be trained with as they are."""

import json
from pathlib import Path

import pytest

from muster_command import Muster
from torchmuster.cli.recipe import recipes
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.training import check_trainable
from torchmuster.errors import ExitCode

NAMES = ["images", "pretrain", "qlora", "sft", "sft-lora"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_written_once_and_its_settings_are_right(
    name: str, muster: Muster, tmp_path: Path
) -> None:
    done = muster("recipe", "new", name)
    assert done.code == ExitCode.GOOD, done.err
    path = tmp_path / f"{name}.yaml"
    resolved = resolve_settings(file=path)
    check_trainable(resolved, file=str(path))
    assert resolved.settings.experiment_name == name
    assert muster("recipe", "show", name).out == path.read_text()
    assert muster("recipe", "new", name).code == ExitCode.IMPOSSIBLE
    assert muster("recipe", "new", name, "--to", "mine.yaml").code == ExitCode.GOOD
    assert "--config mine.yaml" in (tmp_path / "mine.yaml").read_text()


def test_the_list_has_every_recipe(muster: Muster) -> None:
    listed = json.loads(muster("recipe", "list", "--json").out)
    assert [one["name"] for one in listed] == NAMES == list(recipes())
    shown = muster("recipe", "list").out
    assert all(one["about"] in shown for one in listed)


def test_an_unknown_recipe_is_refused_with_the_known_ones(muster: Muster) -> None:
    refused = muster("recipe", "show", "grpo")
    assert refused.code == ExitCode.IMPOSSIBLE
    assert all(name in refused.err for name in NAMES)
