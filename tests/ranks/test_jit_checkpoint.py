"""Hugging Face's Trainer saves when muster's launcher gets SIGTERM, as under torchrun."""

from pathlib import Path

import pytest

from ranks.jit_checkpoint import stop_training

pytestmark = [pytest.mark.ranks, pytest.mark.nightly, pytest.mark.integrations]


def test_a_hugging_face_trainer_saves_when_the_launcher_gets_sigterm(own_machine: Path) -> None:
    stopped = stop_training(own_machine)
    assert stopped.code in (75, 143), stopped.output
    assert len(stopped.saved) == 1, stopped.output
    assert stopped.torn == (), stopped.output
