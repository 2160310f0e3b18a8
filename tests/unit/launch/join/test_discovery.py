"""Finding the host without an address, by real multicast on this machine's loopback."""

import asyncio
import builtins
import dataclasses
import os
from typing import Any

import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch.transports.join import listener
from torchmuster.launch.transports.join.service import JoinService
from unit.launch.join.open_host import LOOPBACK, join

pytestmark = pytest.mark.usefixtures("time_enough")


def test_a_short_code_is_enough_on_the_local_network() -> None:
    async def story() -> None:
        arrived: asyncio.Queue[int] = asyncio.Queue()
        service = JoinService(
            count=1,
            addresses=[LOOPBACK],
            on_event=pytest.fail,
            on_code=lambda place, code: None,
        )
        await service.open(lambda place, channel: arrived.put_nowait(place))
        machine = await join(service.codes()[1].short(), discover=True)
        assert await arrived.get() == 1
        assert machine.host.port == service.port
        await machine.close()
        await service.close()

    asyncio.run(story())


def test_addresses_that_lead_nowhere_are_made_up_for_by_the_search() -> None:
    async def story() -> None:
        service = JoinService(
            count=1,
            addresses=[LOOPBACK],
            on_event=pytest.fail,
            on_code=lambda place, code: None,
        )
        await service.open(lambda place, channel: None)
        elsewhere = dataclasses.replace(service.codes()[1], addresses=("127.0.0.99",))
        machine = await join(elsewhere, discover=True)
        assert machine.host.address == LOOPBACK
        await machine.close()
        await service.close()

    asyncio.run(story())


def test_a_host_that_has_gone_is_not_found() -> None:
    async def story() -> None:
        fingerprint = os.urandom(16)
        announcing = asyncio.create_task(
            listener.announce(fingerprint, port=4711, addresses=[LOOPBACK])
        )
        found = await listener.find_hosts(fingerprint, timeout_s=GIVE_UP_S)
        assert found == listener.HostFound(addresses=(LOOPBACK,), port=4711)
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        assert await listener.find_hosts(fingerprint, timeout_s=0.5) is None

    asyncio.run(story())


def test_what_is_announced_says_nothing_of_the_code() -> None:
    fingerprint = os.urandom(16)
    name = listener.announced_id(fingerprint)
    assert name == listener.announced_id(fingerprint)
    assert fingerprint.hex() not in name
    assert name not in fingerprint.hex()
    assert listener.announced_id(os.urandom(16)) != name


def test_without_zeroconf_a_short_code_says_what_to_install_and_a_long_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "zeroconf":
            raise ImportError(name)
        return real(name, *rest)

    async def story() -> None:
        events: list[str] = []
        service = JoinService(
            count=1, addresses=[LOOPBACK], on_event=events.append, on_code=lambda *_: None
        )
        await service.open(lambda place, channel: None)
        code = service.codes()[1]
        with pytest.raises(Impossible) as caught:
            await join(code.short(), discover=True)
        assert caught.value.fix == "pip install 'torchmuster[join]'"
        machine = await join(code, discover=True)
        await machine.close()
        await service.close()
        assert "pip install 'torchmuster[join]'" in events[0]

    monkeypatch.setattr(builtins, "__import__", without)
    asyncio.run(story())
