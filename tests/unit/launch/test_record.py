"""What a machine says of itself, also where its torch is broken."""

import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def test_it_does_not_import_torch() -> None:
    code = (
        "import sys; from torchmuster.launch import fingerprint\n"
        "found = fingerprint.this_node()\n"
        "print('torch' in sys.modules, found.torch)"
    )
    run = [sys.executable, "-c", code]
    words = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert words == ["False", fingerprint.torch_version()]


def folder_with_torch(place: Path, version: str) -> list[str]:
    (place / "torch").mkdir()
    (place / "torch/__init__.py").write_text("raise ImportError('libcudart.so.12 is missing')\n")
    (place / "torch/version.py").write_text(version)
    return [str(place)]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "from typing import Optional\n__version__ = '2.13.0+cu126'\ndebug = False\n",
            "2.13.0+cu126",
        ),
        ('__version__: str = "2.9.1"\n', "2.9.1"),
    ],
)
def test_the_version_is_read_with_its_build_and_nothing_is_run(
    tmp_path: Path, text: str, version: str
) -> None:
    assert fingerprint.torch_version(folder_with_torch(tmp_path, text)) == version
