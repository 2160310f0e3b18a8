"""What every view says of a run's last checkpoint."""

import pytest

from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Metric
from torchmuster.monitor.views.key_figures import key_figures

AGE, STEP = catalogue.CHECKPOINT_AGE, catalogue.CHECKPOINT_STEP


@pytest.mark.parametrize(
    ("values", "ended", "text"),
    [
        ({AGE: 300.0}, False, "not yet"),  # its age is then the run's
        ({AGE: 300.0, STEP: 40.0}, False, "step 40, 5 min ago"),
        ({AGE: 4.0, STEP: 1200.0}, True, "step 1,200"),
        ({AGE: 4.0}, True, "not yet"),
        ({}, False, None),
    ],
)
def test_the_last_checkpoint(values: dict[Metric, float], ended: bool, text: str | None) -> None:
    found = {one.title: one.text for one in key_figures(values, ended=ended)}
    assert found.get("saved") == text
