"""The page about the wire protocol says what the code does."""

from torchmuster.launch import protocol
from torchmuster.launch.transports.join import (
    code,
    connection_handler,
    service,
    stream,
    token_registry,
)
from unit.launch.join import wire_tables


def test_every_message_is_in_the_page_as_it_is_in_the_code() -> None:
    """To write the tables anew: PYTHONPATH=tests python tests/unit/launch/join/wire_tables.py."""
    written = wire_tables.in_page(wire_tables.PAGE.read_text(encoding="utf-8"))
    assert written == wire_tables.tables()


def test_every_kind_of_message_is_in_a_table() -> None:
    listed = {message for messages in wire_tables.SECTIONS.values() for message in messages}
    kinds = {one for one in vars(protocol).values() if isinstance(one, type)}
    assert {one for one in kinds if issubclass(one, protocol.Message)} - {
        protocol.Message
    } <= listed


def test_the_numbers_in_the_page_are_those_of_the_code() -> None:
    page = " ".join(wire_tables.PAGE.read_text(encoding="utf-8").split())
    for sentence in (
        f"protocol {protocol.PROTOCOL}",
        f"at most {protocol.LINE_LIMIT} bytes",
        f"at most {protocol.MESSAGE_LIMIT // 2**20} MiB",
        f"at most {token_registry.JOIN_LIMIT} bytes",
        f"within {connection_handler.HANDSHAKE_S} s",
        f"within {connection_handler.JOIN_S:g} s",
        f"{connection_handler.LISTENED_TO} connections",
        f"from each for at most {connection_handler.CHANCE_S:g} s",
        f"{code.FINGERPRINT_BYTES} bytes of its SHA-256",
        f"for {stream.SEND_S:g} s",
        f"at most every {service.NEWS_EVERY_S:g} s",
        f"at most {connection_handler.IN_LINE} plus one for each expected machine",
    ):
        assert sentence in page, sentence
