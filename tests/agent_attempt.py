"""One machine's ranks as a node agent runs them, without a launcher."""

import asyncio
import os
from pathlib import Path

from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.node.attempt import RunningAttempt
from torchmuster.launch.node.ranks import NodeShare, host_environment


class Attempt:
    """Two ranks, and what their node agent said: ranks 4 and 5 of 6 on the last of two hosts, or ``alone``."""

    def __init__(
        self, folder: Path, script: str, *, alone: bool = False, port: int = 29400
    ) -> None:
        self.token = os.urandom(8).hex()
        (folder / "train.py").write_text(script)
        (folder / "logs").mkdir()
        (folder / "records").mkdir()
        prepare = protocol.Prepare(
            run_id="r",
            token=self.token,
            command=("train.py", "--lr", "1"),
            module=False,
            folder=str(folder),
            device="cpu",
            ranks=2,
        )
        address = "127.0.0.1" if alone else "10.0.0.1"
        start = protocol.Start(
            attempt=0,
            node_rank=0 if alone else 1,
            nodes=1 if alone else 2,  # the first one has more ranks
            first_rank=0 if alone else 4,
            world_size=2 if alone else 6,
            address=address,
            port=port,
            interface=None,
            max_restarts=0,
        )
        self.share = NodeShare(
            prepare=prepare,
            start=start,
            ranks=2,
            logs=folder / "logs",
            records=folder / "records",
        )
        self.said: list[protocol.FromAgent] = []
        self.changed = asyncio.Event()

    async def send(self, message: protocol.FromAgent) -> None:
        self.said.append(message)
        self.changed.set()

    def output(self) -> dict[int, str]:
        texts: dict[int, str] = {}
        for message in self.said:
            if isinstance(message, protocol.Output):
                texts[message.rank] = texts.get(message.rank, "") + message.text
        return texts

    async def until_both_spoke(self) -> None:
        while len(self.output()) < 2:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), GIVE_UP_S)

    def running(self, **variables: str) -> RunningAttempt:
        """Return the ranks to be started, with these variables."""
        base = {**os.environ, **variables}
        environment = host_environment(self.share.prepare, base, {}, threads=1)
        return RunningAttempt(self.share, environment, self.send)
