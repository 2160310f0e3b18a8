"""Places and tokens: one machine per place, one use per token."""

from torchmuster.launch.transports.join.token_registry import Refusal, TokenRegistry


def test_a_token_opens_its_own_place_and_no_other() -> None:
    token_registry = TokenRegistry(1, 2)
    assert token_registry.examine(1, token_registry.token(1)) is None
    assert token_registry.examine(2, token_registry.token(1)) == Refusal(by=None)
    assert token_registry.examine(7, token_registry.token(1)) == Refusal(by=None)
    assert token_registry.examine(0, bytes(16)) == Refusal(by=None)


def test_a_spent_token_says_by_whom_also_after_the_place_was_given_up() -> None:
    token_registry = TokenRegistry(1, 1)
    token = token_registry.token(1)
    guest = token_registry.seat(1, host="gpu-b", address="10.0.0.3")
    assert token_registry.examine(1, token) == Refusal(by=guest)
    token_registry.vacate(1)
    assert token_registry.examine(1, token) == Refusal(by=guest)
    assert token_registry.examine(1, token_registry.token(1)) is None
    assert str(guest).startswith("gpu-b (10.0.0.3) at ")


def test_a_free_place_never_has_the_token_of_before() -> None:
    token_registry = TokenRegistry(1, 1)
    seen = set()
    for _ in range(50):
        seen.add(token_registry.token(1))
        token_registry.seat(1, host="a", address="10.0.0.3")
        token_registry.vacate(1)
    assert len(seen) == 50
    assert all(token_registry.examine(1, token) is not None for token in seen)


def test_names_are_those_people_know_and_differ() -> None:
    token_registry = TokenRegistry(1, 4)
    assert token_registry.names() == ("machine 2", "machine 3", "machine 4", "machine 5")
    token_registry.seat(1, host="gpu-b", address="10.0.0.3")
    token_registry.seat(2, host="localhost", address="10.0.0.4")
    token_registry.seat(4, host="localhost", address="10.0.0.5")
    assert token_registry.names() == (
        "gpu-b",
        "localhost (10.0.0.4)",
        "machine 4",
        "localhost (10.0.0.5)",
    )
    assert token_registry.missing() == (3,)
