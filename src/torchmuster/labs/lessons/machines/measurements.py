"""What the report shows: how fast a store answers, and what connections meet on this machine."""

import os
import socket
import time

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from torchmuster.labs.measurements import Bars, Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench


def measure(bench: Bench) -> list[Part]:
    """Call the roll many times, gather, and knock at doors."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    calls = []
    for count in (1, 4, 16, 64):
        begin = time.perf_counter()
        for number in range(count):
            place = PrefixStore(f"call-{count}-{number}", store)
            bench.code.gather_names(place, bench.rank, 2, "a", 10.0)
        calls.append((float(count), time.perf_counter() - begin))
    begin = time.perf_counter()
    for _ in range(50):
        gathered = bench.code.test_all_gather_basic()
    gathering_s = (time.perf_counter() - begin) / 50
    doors = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        doors["a port with a program"] = _knock(bench, "127.0.0.1", server.getsockname()[1])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        doors["a port without one"] = _knock(bench, "127.0.0.1", closed.getsockname()[1])
    doors["a name that nobody has"] = _knock(bench, "no-such-machine.invalid", 29400)
    return [
        Curves(
            title="time to gather names through the store",
            x="rounds",
            x_log=True,
            y="time",
            y_unit="s",
            series=[Series(name="", points=calls)],
        ),
        Bars(
            title="one of each",
            unit="s",
            values={"gather names": calls[-1][1] / 64, f"gather {gathered}": gathering_s},
        ),
        Table(
            title="what connections meet",
            columns=["", "diagnose says", "ms"],
            rows=[[name, said, f"{took * 1e3:.1f}"] for name, (said, took) in doors.items()],
        ),
    ]


def _knock(bench: Bench, address: str, port: int) -> tuple[str, float]:
    begin = time.perf_counter()
    said = str(bench.code.diagnose(address, port, 1.0))
    return said, time.perf_counter() - begin
