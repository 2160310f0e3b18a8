import pytest

from patience import GIVE_UP_S
from torchmuster.launch.keeper import engagement, keeper, running, watchman


@pytest.fixture
def patient_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper gives nobody up because the machine is busy, but where a test asks for it."""
    for place, name in (
        (keeper, "_SILENT_AT_FIRST_S"),
        (keeper, "_GONE_WITHIN_S"),
        (running, "_KILL_WITHIN_S"),
        (engagement, "_GONE_WITHIN_S"),
        (watchman, "_GO_WITHIN_S"),
    ):
        monkeypatch.setattr(place, name, GIVE_UP_S)
