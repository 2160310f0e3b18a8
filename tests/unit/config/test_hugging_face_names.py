"""Names of transformers, TRL and peft in settings: the error names our setting."""

import pytest

from torchmuster.config import fields
from torchmuster.config.hugging_face_names import HUGGING_FACE_NAMES
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import ConfigError


@pytest.mark.parametrize("name", HUGGING_FACE_NAMES)
def test_every_name_leads_to_a_setting_that_exists(name: str) -> None:
    setting = HUGGING_FACE_NAMES[name]
    assert any(setting.startswith(path) for path in fields.leaves())
    for place in (name, f"train.{name}", f"training_arguments.{name}"):
        with pytest.raises(ConfigError) as refused:
            resolve_settings(flags=[Flag(flag="--set", path=place, text="1")])
        assert refused.value.mistakes[0].fix == f"use {setting}"


@pytest.mark.parametrize("name", ["weight_decay", "log_level"])
def test_other_names_are_suggested_if_they_are_near(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_settings(flags=[Flag(flag="--set", path=name, text="1")])
    is_near = name == "weight_decay"
    assert ("did you mean train.w" in refused.value.mistakes[0].fix) == is_near
