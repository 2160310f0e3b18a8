import pytest

from patience import GIVE_UP_S
from torchmuster.launch.transports.join import client, service


@pytest.fixture
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is sent away for being slow on a busy machine, but where a test asks for it."""
    for place, name in (
        (service, "HANDSHAKE_S"),
        (service, "JOIN_S"),
        (client, "CONNECT_S"),
        (client, "HANDSHAKE_S"),
        (client, "ANSWER_S"),
    ):
        monkeypatch.setattr(place, name, GIVE_UP_S)
