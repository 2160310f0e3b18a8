import pytest

from patience import GIVE_UP_S
from torchmuster.launch.node import attempt, node_agent, sidecar


@pytest.fixture
def patient_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node agent gives nobody up because the machine is busy, but where a test asks for it."""
    for place, name in (
        (node_agent, "_SILENT_AT_FIRST_S"),
        (node_agent, "_GONE_WITHIN_S"),
        (attempt, "_KILL_WITHIN_S"),
        (sidecar, "_GONE_WITHIN_S"),
    ):
        monkeypatch.setattr(place, name, GIVE_UP_S)
