import pytest

from patience import GIVE_UP_S
from torchmuster.launch.transports.join import client, transport


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is sent away for being slow on a busy machine, but where a test asks for it."""
    monkeypatch.setattr(transport, "GREET_S", GIVE_UP_S)
    monkeypatch.setattr(client, "CONNECT_S", GIVE_UP_S)
    monkeypatch.setattr(client, "ANSWER_S", GIVE_UP_S)
