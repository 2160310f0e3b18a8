"""Names of transformers, TRL and peft in settings: the error names our setting and the conversion."""

from pathlib import Path

import pytest

from torchmuster.config import fields
from torchmuster.config.hugging_face_names import HUGGING_FACE_NAMES
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import ConfigError


@pytest.mark.parametrize("name", HUGGING_FACE_NAMES)
def test_every_name_leads_to_a_setting_that_exists(name: str) -> None:
    known, _ = HUGGING_FACE_NAMES[name]
    assert known in fields.leaves()
    for place in (name, f"train.{name}", f"training_arguments.{name}"):
        if place not in fields.leaves():
            with pytest.raises(ConfigError) as refused:
                resolve_settings(flags=[Flag(flag=f"--set {place}=1", path=place, text="1")])
            assert known in refused.value.mistakes[0].fix


def test_the_batch_sizes_of_a_file_are_multiplied(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nadam_beta1: 0.8\n"
    )
    with pytest.raises(ConfigError) as refused:
        resolve_settings(file=file)
    fixes = [mistake.fix for mistake in refused.value.mistakes]
    assert "train.micro_batch_size" in fixes[0]
    assert "train.global_batch_size = 2 x 4 x ranks" in fixes[0]
    assert fixes[1] == "use train.global_batch_size = 2 x 4 x ranks"
    assert fixes[2] == "use train.optimizer_options: {betas: [0.8, adam_beta2]}"
