"""The health test of a hot spare: the checks of ``muster check`` that run on one host."""

from collections.abc import Sequence

from torchmuster.diagnose.check import Cost
from torchmuster.diagnose.group import finding_from_json
from torchmuster.diagnose.probing import HostProbe
from torchmuster.finding import Finding
from torchmuster.launch.launcher.host import ConnectedHost

_WHOLE_WITHIN_S, _SHORT_WITHIN_S = 120.0, 20.0


class SpareCheck:
    """Tests spares; the probe program stays on each of them, so that the last test starts at once."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._probes: dict[str, HostProbe] = {}

    async def __call__(self, node: ConnectedHost, *, whole: bool) -> Sequence[Finding]:
        """Return the findings of all checks, or of those that only read a few files."""
        probe = self._probes.get(node.part)
        if probe is None:
            probe = self._probes[node.part] = await HostProbe.engage(node)
        cost = Cost.SECONDS if whole else Cost.INSTANT
        argument = {"folder": self._folder, "at_most": cost.name}
        within_s = _WHOLE_WITHIN_S if whole else _SHORT_WITHIN_S
        checks = await probe.ask("examine", argument, within_s=within_s)
        return [finding_from_json(item) for check in checks for item in check["findings"]]
