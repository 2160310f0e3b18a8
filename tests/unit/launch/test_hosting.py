"""The machines of ``muster run --join``: this one and those that join, each with a name of its own."""

import asyncio
import platform

import pytest

from torchmuster.launch.transports.channel import Channel
from torchmuster.launch.transports.hosting import HostTransport
from torchmuster.launch.transports.join.code import JoinCode
from torchmuster.launch.transports.local import LocalTransport
from unit.launch.join.open_host import LOOPBACK, join


def test_machines_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: LocalTransport, arrive: object) -> None:
        """Without the node agent of this machine."""

    monkeypatch.setattr(LocalTransport, "open", nothing)
    monkeypatch.setattr(platform, "node", lambda: "vm")
    codes: list[JoinCode] = []

    async def names_as_they_come() -> list[list[str]]:
        arrivals: asyncio.Queue[tuple[int, Channel]] = asyncio.Queue()
        transport = HostTransport(
            "vm",
            nodes=4,
            addresses=[LOOPBACK],
            port=None,
            on_event=print,
            on_code=codes.append,
        )
        await transport.open(lambda place, channel: arrivals.put_nowait((place, channel)))
        seen, guests = [list(transport.places)], []
        for place in (2, 1, 3):
            guests.append(await join(codes[0], place=place))
            await arrivals.get()
            seen.append(list(transport.places))
        for guest in guests:
            await guest.close()
        await transport.close()
        return seen

    assert asyncio.run(names_as_they_come()) == [
        ["vm", "machine 2", "machine 3", "machine 4"],
        ["vm", "machine 2", "vm (3)", "machine 4"],
        ["vm", "vm (2)", "vm (3)", "machine 4"],
        ["vm", "vm (2)", "vm (3)", "vm (4)"],
    ]
