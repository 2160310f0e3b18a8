"""Measurements of the report: response time of a store, and outcomes of connections."""

import os
import socket
import time

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from torchmuster.labs.measurements import Bars, Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench


def measure(bench: Bench) -> list[Part]:
    """Time many joins and a gather, and try connections."""
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
        doors["a listening port"] = _knock(bench, "127.0.0.1", server.getsockname()[1])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        doors["a closed port"] = _knock(bench, "127.0.0.1", closed.getsockname()[1])
    doors["an unknown name"] = _knock(bench, "no-such-machine.invalid", 29400)
    return [
        Curves(
            title="time to join through the store",
            x="number of joins",
            x_log=True,
            y="time",
            y_unit="s",
            series=[Series(name="", points=calls)],
        ),
        Bars(
            title="one operation each",
            unit="s",
            values={"joining": calls[-1][1] / 64, f"gather {gathered}": gathering_s},
        ),
        Table(
            title="connection attempts",
            columns=["", "diagnose", "ms"],
            rows=[[name, said, f"{took * 1e3:.1f}"] for name, (said, took) in doors.items()],
        ),
    ]


def _knock(bench: Bench, address: str, port: int) -> tuple[str, float]:
    begin = time.perf_counter()
    said = str(bench.code.diagnose(address, port, 1.0))
    return said, time.perf_counter() - begin
