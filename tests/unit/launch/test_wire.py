"""The messages between launcher and node agents: what is sent arrives, what is not one of them does not."""

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
    failures=(protocol.Failure(rank=3, exit_code=-9, ago_s=0.25, evidence="the kernel killed it"),),
)


def through_a_pipe(message: protocol.Message) -> bytes:
    """Return the JSON that arrives, from one line."""
    line = protocol.to_line(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return protocol.from_line(line)


def test_what_is_sent_through_a_pipe_arrives() -> None:
    assert protocol.decode_to_agent(through_a_pipe(PREPARE)) == PREPARE
    assert protocol.decode_from_agent(through_a_pipe(ENDED)) == ENDED


@given(st.text(max_size=3000), st.integers(0, 10**6))
def test_any_text_of_a_rank_arrives(text: str, rank: int) -> None:
    safe = text.encode("utf-8", errors="replace").decode()  # halves of characters never leave a log
    message = protocol.Output(rank=rank, text=safe)
    assert protocol.decode_from_agent(through_a_pipe(message)) == message


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
        b'{"kind":"relay","program":"torchmuster.diagnose.host_probe","token":""}',
        b'{"kind":"relay","program":"torchmuster.diagnose.host_probe","token":"a\\n/home"}',
        b'{"kind":"relay","program":"torchmuster.diagnose.host_probe","token":"a\\n"}',
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


def test_a_line_that_is_too_long_is_refused() -> None:
    with pytest.raises(protocol.UnreadableMessage):
        protocol.from_line(b"=" + b"x" * protocol.MESSAGE_LIMIT)
