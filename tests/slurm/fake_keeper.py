"""A keeper that keeps nothing: it says hello, answers, and ends as it is told to."""

import argparse
import os
import signal
import sys

from torchmuster.launch import wire


def say(message: wire.Message) -> None:
    sys.stdout.buffer.write(wire.to_lines(message))
    sys.stdout.buffer.flush()


def answer(message: wire.ToKeeper) -> None:
    match message:
        case wire.Prepare():  # how it is here: the GPUs, and the variables that are asked for
            values = tuple(os.environ.get(name, "") for name in message.command)
            gpus = tuple(
                word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word
            )
            say(wire.Prepared(ranks=1, devices=gpus, reasons=values, fingerprint=None))
        case wire.Stop():  # the same words back
            say(wire.Output(rank=int(message.grace_s), text=message.why))
        case wire.Signal(name="KILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        case wire.Signal(name="FAIL"):
            say(wire.Waiting(words="last words"))
            sys.exit("no reason to live")
        case wire.Leave():
            sys.exit(message.exit_code)
        case _:
            say(wire.Alive())


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
    record = wire.NodeRecord(
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
    say(wire.Hello(protocol=wire.PROTOCOL, record=record))
    assembler = wire.Assembler()
    for line in sys.stdin.buffer:
        to, _, rest = line.partition(b" ")
        if to in mine and (whole := assembler.add(rest)) is not None:
            answer(wire.decode_to_keeper(whole))
    print(f"place {place} heard the end", file=sys.stderr)
    sys.stderr.flush()


main()
