"""Places and tokens: one machine per place, one use per token."""

from torchmuster.launch.transports.join.token_registry import Refusal, TokenRegistry


def test_a_token_opens_its_own_place_and_no_other() -> None:
    roster = TokenRegistry(1, 2)
    assert roster.examine(1, roster.token(1)) is None
    assert roster.examine(2, roster.token(1)) == Refusal(by=None)
    assert roster.examine(7, roster.token(1)) == Refusal(by=None)
    assert roster.examine(0, bytes(16)) == Refusal(by=None)


def test_a_spent_token_says_by_whom_also_after_the_place_was_given_up() -> None:
    roster = TokenRegistry(1, 1)
    token = roster.token(1)
    guest = roster.seat(1, host="gpu-b", address="10.0.0.3")
    assert roster.examine(1, token) == Refusal(by=guest)
    roster.vacate(1)
    assert roster.examine(1, token) == Refusal(by=guest)
    assert roster.examine(1, roster.token(1)) is None
    assert str(guest).startswith("gpu-b (10.0.0.3) at ")


def test_a_free_place_never_has_the_token_of_before() -> None:
    roster = TokenRegistry(1, 1)
    seen = set()
    for _ in range(50):
        seen.add(roster.token(1))
        roster.seat(1, host="a", address="10.0.0.3")
        roster.vacate(1)
    assert len(seen) == 50
    assert all(roster.examine(1, token) is not None for token in seen)


def test_names_are_those_people_know_and_differ() -> None:
    roster = TokenRegistry(1, 4)
    assert roster.names() == ("machine 2", "machine 3", "machine 4", "machine 5")
    roster.seat(1, host="gpu-b", address="10.0.0.3")
    roster.seat(2, host="localhost", address="10.0.0.4")
    roster.seat(4, host="localhost", address="10.0.0.5")
    assert roster.names() == (
        "gpu-b",
        "localhost (10.0.0.4)",
        "machine 4",
        "localhost (10.0.0.5)",
    )
    assert roster.missing() == (3,)
