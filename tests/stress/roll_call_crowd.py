"""A node registry of many simulated machines on loopback; run as a program.

``host N`` opens the join service for N machines, starts two crowds of clients as processes of their
own, and drives every machine through join, hello, prepare, prepared and start. It prints one JSON
line with what that cost. ``crowd`` is one of the crowds: it reads codes, one per line, and plays all
of their machines until the host closes.
"""

import asyncio
import json
import resource
import sys
import time
from dataclasses import dataclass, field

import psutil

from torchmuster.launch import protocol
from torchmuster.launch.transports.channel import Channel
from torchmuster.launch.transports.join import client
from torchmuster.launch.transports.join import code as codes
from torchmuster.launch.transports.join.service import JoinService

CROWDS = 2
# How many machines of a crowd connect at once: far more than the host listens to at once, and few
# enough that one process can answer for all of them in time.
AT_ONCE = 500
ADDRESS = "127.0.0.1"

HELLO = protocol.Hello(
    protocol=protocol.PROTOCOL,
    record=protocol.NodeRecord(
        host="node",
        user="somebody",
        pid=1,
        system="linux",
        machine="x86_64",
        python="3.11.7",
        torch="2.13.0",
        torchmuster="0",
        cores=128,
        clock_unix_s=0.0,
        addresses=tuple(
            protocol.Address(address=f"10.0.0.{number}", interface=f"eth{number}")
            for number in range(4)
        ),
    ),
)
PREPARED = protocol.Prepared(
    ranks=8,
    devices=tuple(f"GPU-{number:032d}" for number in range(8)),
    reasons=("all 8 GPUs are free",),
    fingerprint=protocol.Fingerprint(script_sha256="0" * 64, code_sha256="1" * 64, code_files=10),
)
PREPARE = protocol.Prepare(
    run_id="crowd",
    token="t" * 32,
    command=("train.py", "--lr", "0.1"),
    module=False,
    folder="/home/somebody/project",
    device="gpu",
    ranks=8,
    environment={f"VARIABLE_{number}": "value" for number in range(10)},
    alone=False,
)


def start_message(place: int, nodes: int) -> protocol.Start:
    return protocol.Start(
        attempt=0,
        node_rank=place,
        nodes=nodes,
        first_rank=8 * place,
        world_size=8 * nodes,
        address="10.0.0.1",
        port=29400,
        interface="eth0",
        max_restarts=0,
    )


@dataclass
class RollCall:
    """Drives all machines; nobody is prepared before everybody is here."""

    nodes: int
    all_here: asyncio.Event = field(default_factory=asyncio.Event)
    all_prepared: asyncio.Event = field(default_factory=asyncio.Event)
    here: int = 0
    prepared: int = 0
    messages: int = 0
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    everybody_arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def arrive(self, place: int, channel: Channel) -> None:
        self.messages += 2  # join and welcome
        self.tasks.append(asyncio.create_task(self.drive(place, channel)))
        if len(self.tasks) == self.nodes:
            self.everybody_arrived.set()

    async def drive(self, place: int, channel: Channel) -> None:
        assert isinstance(await channel.receive(), protocol.Hello)
        self.here += 1
        if self.here == self.nodes:
            self.all_here.set()
        await self.all_here.wait()
        await channel.send(PREPARE)
        assert isinstance(await channel.receive(), protocol.Prepared)
        self.prepared += 1
        if self.prepared == self.nodes:
            self.all_prepared.set()
        await self.all_prepared.wait()
        await channel.send(start_message(place, self.nodes))
        self.messages += 4


async def host(nodes: int) -> None:
    registry = RollCall(nodes)
    events: list[str] = []
    service = JoinService(
        count=nodes,
        first_place=0,
        addresses=[ADDRESS],
        on_event=events.append,
    )
    await service.open(registry.arrive)
    code = codes.encode_code(service.code)
    lines = [f"{place} {code}\n" for place in range(nodes)]
    crowds = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "crowd",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(CROWDS)
    ]
    for crowd in crowds:
        assert crowd.stdout is not None
        await crowd.stdout.readline()  # it is ready
    memory_bytes = psutil.Process().memory_info().rss
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    for number, crowd in enumerate(crowds):
        assert crowd.stdin is not None
        crowd.stdin.write("".join(lines[number::CROWDS]).encode())
        crowd.stdin.close()
    await registry.everybody_arrived.wait()
    joined_s = time.monotonic() - began_s
    await asyncio.gather(*registry.tasks)
    started = 0
    for crowd in crowds:
        assert crowd.stdout is not None
        started += int(await crowd.stdout.readline())
    seconds = time.monotonic() - began_s
    told = {
        "nodes": nodes,
        "started": started,
        "seconds": round(seconds, 2),
        "join_seconds": round(joined_s, 2),
        "host_cpu_seconds": round(time.process_time() - began_cpu_s, 2),
        "memory_per_node_bytes": (psutil.Process().memory_info().rss - memory_bytes) // nodes,
        "messages_per_node": registry.messages / nodes,
        "still_missing": sum(name.startswith("machine ") for name in service.places),
        "events": events[:10],
    }
    await service.close()
    for crowd in crowds:
        await crowd.wait()
    print(json.dumps(told), flush=True)


async def machine(line: str, may_connect: asyncio.Semaphore) -> client.HostChannel:
    place, code = line.split()
    async with may_connect:
        channel = await client.connect_to_host(
            codes.decode_code(code),
            place=int(place),
            on_event=lambda _: None,
            open_firewall=str,
        )
    await channel.send(HELLO)
    assert isinstance(await channel.receive(), protocol.Prepare)
    await channel.send(PREPARED)
    assert isinstance(await channel.receive(), protocol.Start)
    return channel


async def crowd() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("ready", flush=True)
    lines = await asyncio.to_thread(sys.stdin.readlines)
    may_connect = asyncio.Semaphore(AT_ONCE)
    channels = await asyncio.gather(*(machine(line, may_connect) for line in lines))
    print(len(channels), flush=True)
    for channel in channels:
        assert await channel.receive() is None  # until the host closes


if __name__ == "__main__":
    if sys.argv[1] == "host":
        asyncio.run(host(int(sys.argv[2])))
    else:
        asyncio.run(crowd())
