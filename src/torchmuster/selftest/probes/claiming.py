"""Asks for one GPU as a user of this host, prints as JSON whether it got it, and gives it back.

python -m torchmuster.selftest.probes.claiming UUID [USER_ID]

The process becomes that user itself: Python may be installed where other users have no access.
"""

import json
import os
import sys

from torchmuster.devices import snapshot
from torchmuster.devices.acquire import acquire_devices
from torchmuster.devices.claims import Claims
from torchmuster.devices.request import DeviceRequest
from torchmuster.errors import MusterError


def main() -> None:
    """Claim the GPU that the command line names."""
    uuid, *user = sys.argv[1:]
    if user:
        snapshot.take_snapshot()  # loads the libraries, which the other user may not be able to read
        os.setgroups([])
        os.setgid(int(user[0]))
        os.setuid(int(user[0]))
    try:
        # GPUs in use are accepted: only a claim may be in the way.
        with acquire_devices(
            Claims.here(os.environ),
            snapshot.take_snapshot,
            DeviceRequest(ids=(uuid,), share=True),
            environment=os.environ,
            command=["muster", "selftest"],
        ) as held:
            found = {"got": [gpu.uuid for gpu in held.decision.value], "error": "", "why": ""}
    except MusterError as error:
        found = {"got": [], "error": type(error).__name__, "why": f"{error.what}: {error.why}"}
    print(json.dumps({**found, "user_id": os.geteuid()}))


if __name__ == "__main__":
    main()
