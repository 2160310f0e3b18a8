"""The messages between launcher and node agents: what is sent arrives, what is not one of them does not."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launch import protocol

PREPARE = protocol.Prepare(
    run_id="20260131-120000-train-1a2b",
    token="0123.0",
    command=("train.py", "--name", "Zoë's run 🚀", "a\nb", "--empty", ""),
    module=False,
    folder="/home/ana/Käse",
    device="gpu",
    ranks=None,
    gpu_ids=("0", "GPU-8f6b"),
    environment={"NOTE": "tab\there", "EMPTY": ""},
)
ENDED = protocol.Ended(
    attempt=2,
    good=False,
    failures=(
        protocol.Failure(
            rank=3, local_rank=1, exit_code=-9, ago_s=0.25, evidence="the kernel killed it"
        ),
    ),
)


def through_a_pipe(message: protocol.Message) -> bytes:
    """Return the JSON that arrives, from one line."""
    line = protocol.to_line(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return protocol.from_line(line)


@pytest.mark.parametrize(
    "message",
    [
        PREPARE,
        protocol.Listen(nonce="n", port=None),
        protocol.Reach(
            nonce="n", targets=(protocol.Target(address="fd00::1", port=29400),), timeout_s=5.0
        ),
        protocol.Stop(attempt=0, grace_s=5.0, why="Ctrl-C"),
        protocol.Signal(name="SIGUSR1"),
        protocol.Alive(),
        protocol.Leave(exit_code=1, words="rank 1 on b failed: „nichts“"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_launcher_says_arrives(message: protocol.ToAgent) -> None:
    assert protocol.decode_to_agent(protocol.encode(message)) == message
    assert protocol.decode_to_agent(through_a_pipe(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        ENDED,
        protocol.Refused(trouble=protocol.Trouble(name="impossible", what="no", exit_code=2)),
        protocol.Alive(waiting_for="GPU 0 is in use"),
        protocol.Output(rank=7, text="épôque\x1b[31m 1\r\n"),
        protocol.Alive(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_an_agent_says_arrives(message: protocol.FromAgent) -> None:
    assert protocol.decode_from_agent(protocol.encode(message)) == message
    assert protocol.decode_from_agent(through_a_pipe(message)) == message


@given(st.text(max_size=3000), st.integers(0, 10**6))
def test_any_text_of_a_rank_arrives(text: str, rank: int) -> None:
    safe = text.encode("utf-8", errors="replace").decode()  # halves of characters never leave a log
    message = protocol.Output(rank=rank, text=safe)
    assert protocol.decode_from_agent(through_a_pipe(message)) == message


def test_line_ends_of_other_systems_are_no_part_of_a_message() -> None:
    data = protocol.to_line(protocol.Alive()).replace(b"\n", b"\r\n")
    assert protocol.from_line(data) == b'{"kind":"alive"}'


def test_a_field_that_is_not_known_is_ignored() -> None:
    newer = json.loads(protocol.encode(PREPARE)) | {"priority": "high", "more": [1, {"deep": None}]}
    assert protocol.decode_to_agent(json.dumps(newer).encode()) == PREPARE


@pytest.mark.parametrize(
    "data",
    [
        b'{"kind":"explode"}',
        b'{"kind":"ended","attempt":0,"good":true}',  # a node agent's word
        b'{"kind":"stop","grace_s":"soon","why":""}',
        b'{"kind":"stop"}',
        b"{}",
        b"[]",
        b"null",
        b"",
        b"\xff\xfe",
        b'{"kind":"alive"',
        b"GET / HTTP/1.1",
    ],
)
def test_what_is_not_a_message_of_the_launcher_is_an_error(data: bytes) -> None:
    with pytest.raises(protocol.UnreadableMessage):
        protocol.decode_to_agent(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"kind":"alive","x":' + b"[" * 100_000,
        b'{"kind":"leave","exit_code":256,"words":""}',
        b'{"kind":"leave","exit_code":-1,"words":""}',
        b'{"kind":"dump-stacks","ranks":[9223372036854775808]}',
        b'{"kind":"stop","grace_s":NaN,"why":""}',
        b'{"kind":"stop","grace_s":1e999,"why":""}',
        # An empty token would name every process of the user, a line end the folder to be removed.
        b'{"kind":"start-sidecar","program":"torchmuster.diagnose.host_probe","token":""}',
        b'{"kind":"start-sidecar","program":"torchmuster.diagnose.host_probe","token":"a\\n/home"}',
        b'{"kind":"start-sidecar","program":"torchmuster.diagnose.host_probe","token":"a\\n"}',
        protocol.encode(msgspec.structs.replace(PREPARE, token="")),
        protocol.encode(msgspec.structs.replace(PREPARE, token="a\n/home")),
        protocol.encode(msgspec.structs.replace(PREPARE, ranks=10**9)),
    ],
    ids=range(12),
)
def test_what_a_hostile_launcher_says_is_an_error(data: bytes) -> None:
    with pytest.raises(protocol.UnreadableMessage) as caught:
        protocol.decode_to_agent(data)
    assert len(str(caught.value)) <= 200


@pytest.mark.parametrize(
    "data",
    [
        b'{"kind":"alive","x":' + b"[" * 100_000,
        b'{"kind":"explode' + b"x" * 100_000 + b'"}',
        b'{"kind":"output","rank":9223372036854775808,"text":""}',
        b'{"kind":"prepared","ranks":4097,"devices":[],"fingerprint":null}',
        b'{"kind":"heartbeats","attempt":0,"heartbeats":[{"rank":0,"pid":1,"beat":1,"moves":'
        + b"9" * 4000
        + b"}]}",
    ],
    ids=range(5),
)
def test_what_a_hostile_machine_says_is_an_error(data: bytes) -> None:
    with pytest.raises(protocol.UnreadableMessage) as caught:
        protocol.decode_from_agent(data)
    assert len(str(caught.value)) <= 200


@pytest.mark.parametrize("data", [b'{"kind":"leave","exit_code":0,"words":""}', b"\xc3(", b"7"])
def test_what_is_not_a_message_of_an_agent_is_an_error(data: bytes) -> None:
    with pytest.raises(protocol.UnreadableMessage):
        protocol.decode_from_agent(data)


@pytest.mark.parametrize("line", [b"Last login: Mon\n", b"\n", b"", b"\x00=\n", b" =x\n"])
def test_a_line_that_is_not_of_the_protocol_is_named_in_the_error(line: bytes) -> None:
    with pytest.raises(protocol.UnreadableMessage) as caught:
        protocol.from_line(line)
    assert str(caught.value) == line.decode().strip()


def test_a_line_that_is_too_long_is_refused() -> None:
    with pytest.raises(protocol.UnreadableMessage):
        protocol.from_line(b"=" + b"x" * protocol.MESSAGE_LIMIT)


def test_a_number_that_json_does_not_know_is_not_sent_as_nothing_unnoticed() -> None:
    # Such a time would arrive as null, and nobody would understand the message.
    endless = protocol.Stop(attempt=0, grace_s=math.inf, why="")
    with pytest.raises(protocol.UnreadableMessage):
        protocol.decode_to_agent(protocol.encode(endless))
