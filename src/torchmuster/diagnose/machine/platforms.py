"""WSL 2, which other hosts cannot reach by default."""

from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network.firewall import open_command

_WSL_FIX = """\
# in %UserProfile%\\.wslconfig on Windows 11:
[wsl2]
networkingMode=mirrored
# then in PowerShell as administrator:
wsl --shutdown
"""


def wsl(surroundings: Surroundings) -> Iterator[Finding]:
    """Report WSL 2 behind the NAT of Windows."""
    kernel = surroundings.text("/proc/sys/kernel/osrelease") or ""
    mode = (surroundings.output(["wslinfo", "--networking-mode"]) or "").strip().lower()
    if "microsoft" not in kernel.lower() or mode == "mirrored":
        return
    yield finding(
        "wsl2-nat",
        wsl_fix=_WSL_FIX,
        fix=open_command("win32", USUAL_PORT),
        mode=mode or "unknown",
        kernel=kernel.strip(),
    )


CHECKS = (Check(name="platform", asks="Can other hosts reach WSL 2?", run=wsl, systems=("linux",)),)
