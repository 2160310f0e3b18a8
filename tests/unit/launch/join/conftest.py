import pytest

from patience import GIVE_UP_S
from torchmuster.launch.transports.join import client, connection_handler, service


@pytest.fixture
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is sent away for being slow on a busy machine, but where a test asks for it."""
    for place, name in (
        (connection_handler, "HANDSHAKE_S"),
        (connection_handler, "JOIN_S"),
        (client, "CONNECT_S"),
        (client, "HANDSHAKE_S"),
        (client, "ANSWER_S"),
        (service, "NEWS_EVERY_S"),
    ):
        monkeypatch.setattr(place, name, GIVE_UP_S)
