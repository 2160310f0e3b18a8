"""The page about the wire protocol says what the code does."""

from torchmuster.launch import protocol
from torchmuster.launch.transports.join import code, messages, service, stream
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
        f"at most {messages.JOIN_LIMIT} bytes",
        f"within {service.HANDSHAKE_S:g} s",
        f"within {service.JOIN_S:g} s",
        f"{service.MOST_UNPROVEN} connections",
        f"{code.FINGERPRINT_BYTES} bytes of its SHA-256",
        f"for {stream.SEND_S:g} s",
    ):
        assert sentence in page, sentence
