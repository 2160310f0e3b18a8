"""Hosts that do not exist: one process that answers the launcher for all of them, in the place of ``srun``.

Each simulated node agent answers every message at once, and sends heartbeats of its ranks at the interval of a real one. The
launcher cannot tell the difference, so that its own work is real. A control file says what the hosts do meanwhile (`ORDERS`).
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchmuster import __version__
from torchmuster.launch import protocol
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.transports.channel import make_room_for
from torchmuster.launch.transports.join.client import JoinTarget, first_to_answer
from torchmuster.launch.transports.join.invitation import Invitation, read_invitation
from torchmuster.launch.transports.join.stream import HEADER_BYTES
from torchmuster.launch.transports.join.token_registry import (
    Join,
    decode_answer,
    encode_join_message,
)

VARIABLE = "MUSTER_SIMULATED_HOSTS"  # the folder with the orders and the result
ORDERS = "orders"  # quiet | chatty | fail PLACE | silent PLACE
RESULT = "result.json"
RANKS_EACH = 8
_HEARTBEATS_EVERY_S = 2.0  # as attempt.py
_TICK_S = 0.05
_CONNECT_AT_ONCE = 128  # hosts of a real cluster are many; this process is one
_CONNECT_WITHIN_S = 600.0
_LINE = "step 12345 loss 2.3456 lr 1.0e-04 grad_norm 0.98 tokens/s 123456.7\n"

Say = Callable[[protocol.FromAgent], None]


class SimulatedAgent:
    """The node agent of one simulated host."""

    def __init__(self, place: int, say: Say, on_stop: Callable[[], None]) -> None:
        self._place = place
        self._say = say
        self._on_stop = on_stop
        self._attempt = -1
        self._first_rank = 0
        self._moves = 0
        self._keeps_logs = False
        self.silent = False
        self.running = False
        address = f"10.{place >> 16 & 255}.{place >> 8 & 255}.{place & 255}"
        self._here = protocol.Address(address=address, interface="eth0")

    def begin(self) -> None:
        """Say hello."""
        record = protocol.NodeRecord(
            host=f"node{self._place:05d}",
            user="simulated",
            pid=self._place + 1,
            system="linux",
            machine="x86_64",
            python="3.11.7",
            torch="2.13.0",
            torchmuster="0",
            cores=96,
            clock_unix_s=time.time(),
            addresses=(self._here,),
        )
        self._say(protocol.Hello(protocol=protocol.PROTOCOL, record=record))

    def answer(self, message: protocol.ToAgent) -> None:
        """Do at once what the launcher asks."""
        if self.silent:
            return
        match message:
            case protocol.Prepare():
                self._keeps_logs = message.keep_logs
                code = protocol.Fingerprint(
                    script_sha256="s" * 64, code_sha256="c" * 64, code_files=9, packages_sha256="p"
                )
                devices = tuple(f"GPU {index}" for index in range(RANKS_EACH))
                reasons = (f"{RANKS_EACH} ranks: one for each GPU",)
                self._say(
                    protocol.Prepared(
                        ranks=RANKS_EACH, devices=devices, reasons=reasons, fingerprint=code
                    )
                )
            case protocol.Listen():
                self._say(
                    protocol.Listening(
                        port=message.port or 40000, addresses=(self._here,), reason="it is free"
                    )
                )
            case protocol.Reach():
                results = tuple(
                    protocol.ReachResult(target=one, problem="", seconds=0.001, local=self._here)
                    for one in message.targets
                )
                self._say(protocol.Reached(results=results))
            case protocol.Start():
                self._attempt, self._first_rank = message.attempt, message.first_rank
                self.running = True
                self._say(protocol.Started(attempt=message.attempt, pid=self._place + 2))
            case protocol.Stop() if self.running:
                self._on_stop()
                self.running = False
                self._say(protocol.Ended(attempt=self._attempt, good=True))
            case _:
                pass

    def fail(self) -> None:
        """Report that a rank was killed."""
        self.running = False
        failure = protocol.Failure(
            rank=self._first_rank, local_rank=0, exit_code=-signal.SIGKILL, ago_s=0.0
        )
        self._say(protocol.Ended(attempt=self._attempt, good=False, failures=(failure,)))

    def beat(self, lines: int) -> None:
        """Send what a real node agent sends every two seconds: heartbeats, and the output of its ranks."""
        if self.silent:
            return
        if not self.running:
            self._say(protocol.Alive())
            return
        self._moves += 40
        step = self._moves // 40
        moving = self._moves > 40
        last = self._first_rank + (1 if moving else RANKS_EACH)
        heartbeats = tuple(
            Heartbeat(
                rank=rank,
                pid=rank + 1000,
                beat=step,
                moves=self._moves,
                step=step,
                phase="backward",
                place="train.py:88 in step",
                doing="backward",
                state="R",
                busy=1.013,
                memory_bytes=9_123_456_789,
            )
            for rank in range(self._first_rank, last)
        )
        self._say(
            protocol.Heartbeats(
                attempt=self._attempt, heartbeats=heartbeats, moving=moving, kept=True
            )
        )
        for rank in range(self._first_rank, self._first_rank + RANKS_EACH):
            if lines and (rank == 0 or not self._keeps_logs):
                self._say(protocol.Output(rank=rank, text=_LINE * lines))


class SimulatedHosts:
    """All simulated hosts, and what was measured on their side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.agents: dict[int, SimulatedAgent] = {}
        self.received_bytes = 0
        self._has_failed = False
        self._silent_unix_s: float | None = None
        self._stop_unix_s: list[float] = []

    def add(self, place: int, say: Say) -> SimulatedAgent:
        """Return a new host; ``say`` sends its messages."""
        agent = SimulatedAgent(place, say, lambda: self._stop_unix_s.append(time.time()))
        self.agents[place] = agent
        return agent

    async def beat(self) -> None:
        """Send the heartbeats of all hosts, spread over the interval, until cancelled."""
        turns = round(_HEARTBEATS_EVERY_S / _TICK_S)
        due_s = time.monotonic()
        for turn in itertools.count():
            due_s += _TICK_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            lines = self._obey()
            for place in range(turn % turns, max(self.agents, default=-1) + 1, turns):
                if place in self.agents:
                    self.agents[place].beat(lines)

    def _obey(self) -> int:
        """Follow the orders; return how many lines each rank prints per heartbeat."""
        try:
            word, _, place = (self._folder / ORDERS).read_text().partition(" ")
        except OSError:
            return 0
        if word == "fail" and not self._has_failed:
            self._has_failed = True
            self.agents[int(place)].fail()
        if word == "silent" and self._silent_unix_s is None:
            self.agents[int(place)].silent = True
            self._silent_unix_s = time.time()
            self._stop_unix_s.clear()  # those of the restart
        return 2 if word == "chatty" else 0

    def write_result(self) -> None:
        """Write what was measured here."""
        stops = sorted(self._stop_unix_s)
        result = {
            "received_bytes": self.received_bytes,
            "silent_unix_s": self._silent_unix_s,
            "first_stop_unix_s": stops[0] if stops else None,
            "last_stop_unix_s": stops[-1] if stops else None,
        }
        (self._folder / RESULT).write_text(json.dumps(result))


async def _play_srun(nodes: int) -> None:
    hosts = SimulatedHosts(Path(os.environ[VARIABLE]))
    line = await asyncio.to_thread(sys.stdin.buffer.readline)
    invitation = read_invitation(line)
    hosts.received_bytes += len(line) * nodes  # srun sends its input to every task
    at_once = asyncio.Semaphore(_CONNECT_AT_ONCE)
    beating = asyncio.create_task(hosts.beat())
    await asyncio.gather(*(_play_host(hosts, place, invitation, at_once) for place in range(nodes)))
    beating.cancel()
    hosts.write_result()


async def _play_host(
    hosts: SimulatedHosts, place: int, invitation: Invitation, at_once: asyncio.Semaphore
) -> None:
    """Connect as a node agent does, and answer until the launcher closes the connection."""
    code = invitation.code_for(place)
    target = JoinTarget(address=code.addresses[0], port=code.port)
    async with at_once:
        until_s = time.monotonic() + _CONNECT_WITHIN_S
        # As a real node agent, try again: on a busy machine, a handshake may take too long.
        while isinstance(
            answered := await first_to_answer([target], code.fingerprint, patience_s=60.0), list
        ):
            if time.monotonic() > until_s:
                raise ConnectionError(str(answered[0]))
            await asyncio.sleep(1.0)
        stream = answered[0]
        join = Join(
            protocol=protocol.PROTOCOL,
            place=place,
            token=code.token,
            host=f"node{place:05d}",
            torchmuster=__version__,
        )
        await stream.send(encode_join_message(join))
        await stream.receive(protocol.MESSAGE_LIMIT, decode_answer)

    def send(message: protocol.FromAgent) -> None:
        data = protocol.encode(message)
        if not stream.writer.is_closing():
            stream.writer.write(len(data).to_bytes(HEADER_BYTES, "big") + data)

    agent = hosts.add(place, send)
    agent.begin()

    def count(data: bytes) -> protocol.ToAgent:
        hosts.received_bytes += len(data) + HEADER_BYTES
        return protocol.decode_to_agent(data)

    while (message := await stream.receive(protocol.MESSAGE_LIMIT, count)) is not None:
        agent.answer(message)
        if isinstance(message, protocol.Leave):
            break
    await stream.close()


def main() -> None:
    """Play ``srun``: the number of hosts is among its arguments."""
    nodes = next(int(word[8:]) for word in sys.argv if word.startswith("--nodes="))
    make_room_for(nodes, wanted=0)
    asyncio.run(_play_srun(nodes))


if __name__ == "__main__":
    main()
