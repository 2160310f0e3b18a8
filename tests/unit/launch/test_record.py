"""What a machine says of itself."""

import platform
import sys
import time

from torchmuster import __version__
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.launch import fingerprint, protocol
from torchmuster.launch.network.interfaces import Interface


def test_this_very_machine() -> None:
    before = time.time()
    found = fingerprint.this_node(
        interfaces=[Interface(name="eth0", up=True, addresses=("10.0.0.5", "fe80::5"))]
    )
    assert before <= found.clock_unix_s <= time.time()
    assert found == protocol.NodeRecord(
        host=platform.node(),
        system=sys.platform,
        python=platform.python_version(),
        torch=fingerprint.torch_version(),
        torchmuster=__version__,
        cores=usable_cores().value,
        clock_unix_s=found.clock_unix_s,
        addresses=(protocol.Address(address="10.0.0.5", interface="eth0"),),
    )
