"""A node agent that keeps nothing: it says hello, answers, and ends as it is told to."""

import argparse
import os
import signal
import sys

from torchmuster.launch import protocol


def say(message: protocol.Message) -> None:
    sys.stdout.buffer.write(protocol.to_lines(message))
    sys.stdout.buffer.flush()


def answer(message: protocol.ToAgent) -> None:
    match message:
        case protocol.Prepare():  # how it is here: the GPUs, and the variables that are asked for
            values = tuple(os.environ.get(name, "") for name in message.command)
            gpus = tuple(
                word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word
            )
            say(protocol.Prepared(ranks=1, devices=gpus, reasons=values, fingerprint=None))
        case protocol.Stop():  # the same words back
            say(protocol.Output(rank=int(message.grace_s), text=message.why))
        case protocol.Signal(name="KILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        case protocol.Signal(name="FAIL"):
            say(protocol.Waiting(words="last words"))
            sys.exit("no reason to live")
        case protocol.Leave():
            sys.exit(message.exit_code)
        case _:
            say(protocol.Alive())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=int)
    parser.add_argument("--place-from")
    parser.add_argument("--silent", action="store_true")
    options = parser.parse_args()
    place = int(os.environ[options.place_from]) if options.place_from else options.place
    mine = {str(place).encode(), b"*"}
    if options.silent:
        sys.exit("cannot begin")
    record = protocol.NodeRecord(
        host=os.environ["SLURMD_NODENAME"],
        user="root",
        pid=os.getpid(),
        system="linux",
        machine="x86_64",
        python="3.11",
        torch=None,
        torchmuster="0",
        cores=1,
        clock_unix_s=0.0,
        addresses=(),
    )
    print("a line of the task prolog", flush=True)
    say(protocol.Hello(protocol=protocol.PROTOCOL, record=record))
    assembler = protocol.FrameAssembler()
    for line in sys.stdin.buffer:
        to, _, rest = line.partition(b" ")
        if to in mine and (whole := assembler.add(rest)) is not None:
            answer(protocol.decode_to_agent(whole))
    print(f"place {place} heard the end", file=sys.stderr)
    sys.stderr.flush()


main()
