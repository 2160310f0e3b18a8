"""WSL 2, by what it leaves in files and what its programs print."""

from pathlib import Path

from made_up_machine import found, made_up_machine
from torchmuster.diagnose.machine.platforms import CHECKS

(WSL,) = CHECKS
WSL2 = {"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"}


def test_wsl2_behind_windows(tmp_path: Path) -> None:
    outputs = {"wslinfo --networking-mode": "nat\n"}
    finding = found(WSL, made_up_machine(tmp_path, WSL2, outputs=outputs))["wsl2-nat"]
    assert "networkingMode=mirrored" in finding.fix
    assert "New-NetFirewallRule" in finding.fix
