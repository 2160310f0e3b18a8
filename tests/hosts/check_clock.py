"""Measures what the wall-clock model of ``tests/simulated_group.py`` takes for granted, between real hosts.

    PYTHONPATH=tests python tests/hosts/check_clock.py

Run as root; prints medians, in seconds.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence

from hosts.examining import examiners_on
from hosts.lab import Lab
from torchmuster.diagnose.links.messages import Call, Target
from torchmuster.diagnose.links.reaching import OpenedListeners, ask_to_call, serve_all

REPEATS = 20
MANY = 200


async def seconds_of(caller: OpenedListeners, called: Sequence[Target], *, measure: bool) -> float:
    """Return the median of what it takes one machine to call these."""
    taken = []
    for _ in range(REPEATS):
        began = time.monotonic()
        call = Call(nonce="clock", targets=tuple(called), measure=measure)
        results = await ask_to_call(caller.examiner, call)
        taken.append(time.monotonic() - began)
        assert not any(result.problem for result in results)
    return statistics.median(taken)


async def measured(lab: Lab) -> dict[str, float]:
    async with examiners_on(lab.hosts) as examiners:
        first, second = await serve_all(examiners, "clock", None, None)
        assert second.served is not None
        target = Target(
            address=lab.hosts[1].address,
            port=second.served.port,
            udp_port=second.served.udp_ports[lab.hosts[1].address],
        )
        telling = []
        for _ in range(REPEATS):
            began = time.monotonic()
            nothing = Call(nonce="clock", targets=())
            await asyncio.gather(*(ask_to_call(first.examiner, nothing) for _ in range(MANY)))
            telling.append((time.monotonic() - began) / MANY)
        telling_s = statistics.median(telling)
        pair_s = await seconds_of(first, [target], measure=True)
        many_s = await seconds_of(first, [target] * MANY, measure=False)
    return {
        "telling_s": telling_s,
        "pair_s": pair_s - telling_s,
        "call_s": (many_s - telling_s) / MANY,
    }


if __name__ == "__main__":
    with Lab(2, ssh=False) as two:
        print(json.dumps(asyncio.run(measured(two))))
