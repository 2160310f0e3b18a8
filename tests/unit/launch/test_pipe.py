"""A pipe to a node agent: whatever a login prints before it, and however it ends."""

import asyncio
import sys

import pytest

from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.transports import local
from torchmuster.launch.transports.local import PipeChannel

ALIVE = protocol.to_line(protocol.Alive()).decode()
LONG = protocol.Output(rank=3, text="ü" * 3000)
# Neither reads its input nor ends when that ends, like ssh on a link that is cut.
STUCK = "import time; print('ready', flush=True); time.sleep(600)"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    "banner",
    [
        "Last login: today",
        "==== Welcome ====",
        "=",
        "+-----+\n| hi  |\n+-----+",
        '={"not": "ours"}',
        '{"kind":"hello"}',
    ],
)
@pytest.mark.parametrize("message", [protocol.Alive(), LONG])
def test_what_a_login_prints_is_not_taken_for_a_message(
    banner: str, message: protocol.FromAgent
) -> None:
    said = f"{banner}\n{protocol.to_line(message).decode()}"

    async def scene() -> tuple[protocol.FromAgent | None, str]:
        channel = await PipeChannel.open(python(f"import sys; sys.stdout.write({said!r})"))
        first = await channel.receive()
        await channel.close()
        return first, channel.why_closed()

    first, words = asyncio.run(scene())
    assert first == message
    assert words == banner


def test_after_the_first_message_nothing_else_is_let_through() -> None:
    async def scene() -> None:
        channel = await PipeChannel.open(python(f"print({ALIVE!r} + '= Welcome =')"))
        assert await channel.receive() == protocol.Alive()
        with pytest.raises(protocol.UnreadableMessage, match="malformed"):
            await channel.receive()
        await channel.close()

    asyncio.run(scene())


async def stuck(*, full: bool) -> PipeChannel:
    channel = await PipeChannel.open(python(STUCK))
    assert channel._process.stdout is not None
    await channel._process.stdout.readline()
    if full:  # more than a pipe takes
        channel._stdin.write(b"x" * 2**20)
    return channel


@pytest.mark.parametrize("full", [False, True])
def test_one_that_does_not_end_is_ended(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_CLOSE_WITHIN_S", 0.2)

    async def scene() -> int | None:
        channel = await stuck(full=full)
        await asyncio.wait_for(channel.close(), GIVE_UP_S)
        return channel.exit_code

    assert asyncio.run(scene()) == -9


@pytest.mark.parametrize("full", [False, True])
def test_whoever_does_not_wait_for_the_end_leaves_nothing_behind(full: bool) -> None:
    async def scene() -> int | None:
        channel = await stuck(full=full)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.close(), 0.2)
        return channel.exit_code

    assert asyncio.run(scene()) == -9
