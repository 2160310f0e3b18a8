"""The end of a connection whose other side answers no more."""

import asyncio

import pytest

from torchmuster.launch.transports.join import stream
from unit.launch.join.open_host import join, open_host


def test_a_connection_to_a_silent_machine_can_be_closed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "_SHUTDOWN_S", 0.05)

    async def close_twice() -> None:
        async with open_host() as host:
            machine = await join(host.service.code)
            _, channel = await host.arrivals.get()
            machine._stream.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await channel.close()  # the machine does not answer: given up
            await channel.close()
            await machine.close()

    asyncio.run(close_twice())
