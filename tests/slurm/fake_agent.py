"""A node agent that keeps nothing: it connects, says hello, answers, and ends as it is told to."""

import argparse
import asyncio
import os
import signal
import sys

from torchmuster.launch import protocol
from torchmuster.launch.node.__main__ import connect_as
from torchmuster.launch.node.connection import AgentConnection


async def answer(launcher: AgentConnection, message: protocol.ToAgent) -> None:
    match message:
        case protocol.Prepare():  # how it is here: the GPUs, and the variables that are asked for
            values = ",".join(os.environ.get(name, "") for name in message.command)
            gpus = tuple(
                word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word
            )
            prepared = protocol.Prepared(ranks=1, devices=gpus, fingerprint=None, logs=values)
            await launcher.send(prepared)
        case protocol.Stop():  # the same words back
            await launcher.send(protocol.Output(rank=int(message.grace_s), text=message.why))
        case protocol.Signal(name="KILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        case protocol.Signal(name="FAIL"):
            await launcher.send(protocol.Alive(waiting_for="last words"))
            await launcher.close()
            print("no reason to live", file=sys.stderr, flush=True)
            os._exit(1)
        case protocol.Leave():
            os._exit(message.exit_code)
        case _:
            await launcher.send(protocol.Alive())


async def serve(place: int) -> None:
    launcher = await connect_as(place)
    record = protocol.NodeRecord(
        host=os.environ["SLURMD_NODENAME"],
        system="linux",
        python="3.11",
        torch=None,
        torchmuster="0",
        cores=1,
        clock_unix_s=0.0,
        addresses=(),
    )
    await launcher.send(protocol.Hello(protocol=protocol.PROTOCOL, record=record))
    while (message := await launcher.receive()) is not None:
        await answer(launcher, message)
    print(f"place {place} heard the end", file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)  # a thread reads standard input


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=int)
    parser.add_argument("--place-from")
    parser.add_argument("--silent", action="store_true")
    options = parser.parse_args()
    place = options.place
    if options.place_from:
        place = int(os.environ[options.place_from])
    if options.silent:
        sys.exit("cannot begin")
    print("a line of the task prolog", flush=True)
    asyncio.run(serve(place))


main()
