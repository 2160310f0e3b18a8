"""Carry frames between two TAP interfaces, each some time after it came: ``delay_line.py A B MS``.

A program of its own, run in the switch; for kernels without netem. Prints a line when it is ready.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME_BYTES = 65600


def attach(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return descriptor


def carry(one: int, other: int, delay_s: float) -> None:
    opposite = {one: other, other: one}
    # All wait equally long, so they leave in the order in which they came.
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        until_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([one, other], [], [], until_s)
        for descriptor in readable:
            try:
                frame = os.read(descriptor, _FRAME_BYTES)
            except BlockingIOError:
                continue
            waiting.append((time.monotonic() + delay_s, opposite[descriptor], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, out, frame = waiting.popleft()
            try:
                os.write(out, frame)
            except OSError:
                continue  # the interface is down or full: the frame is lost, as on a wire


if __name__ == "__main__":
    ends = attach(sys.argv[1]), attach(sys.argv[2])
    print("up", flush=True)
    carry(*ends, float(sys.argv[3]) / 1000)
