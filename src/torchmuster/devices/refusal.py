"""A refusal that helps: which condition failed on which device, and the nearest that would work."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchmuster.devices.conditions import Obstacle, obstacle
from torchmuster.devices.identify import candidates
from torchmuster.devices.model import Device, Node, label_all
from torchmuster.devices.request import Claim, Request
from torchmuster.devices.visibility import visible
from torchmuster.errors import DevicesBusy, MusterError, TooFewDevices
from torchmuster.finding import Status
from torchmuster.units import plural


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that cannot be met now: everything needed to say why and what would work."""

    node: Node
    request: Request
    offered: Sequence[Device]
    obstacles: Mapping[str, Obstacle]
    claims: Mapping[str, Claim]
    environment: Mapping[str, str]
    wanted: int

    def error(self) -> MusterError:
        """Return the error to raise: DevicesBusy if waiting can help, else TooFewDevices."""
        able = len(self.offered) - len(self.obstacles)
        lasting = sum(not one.passing for one in self.obstacles.values())
        have = f"{able} can be had" if able else "none can be had"
        ways = [shlex.join(["muster", "gpus", "pick", *one.as_flags()]) for one in self.nearest()]
        if len(self.offered) - lasting >= self.wanted:
            waiting = shlex.join(["muster", "gpus", "pick", *self.request.as_flags(), "--wait"])
            return DevicesBusy(
                f"asked for {self.request}: {have} now",
                why=self._why(),
                fix="\n".join([waiting, *ways]),
            )
        if not ways:  # what mends the driver, if that is what is wrong, comes first
            ways = [one.fix for one in self.node.findings if one.status is Status.FAILURE]
            ways.append("run on the CPU: start the program without picking GPUs")
        return TooFewDevices(
            f"asked for {self.request}: {have} here", why=self._why(), fix="\n".join(ways)
        )

    def nearest(self) -> list[Request]:
        """Return the nearest requests that would be granted now.

        One condition is relaxed at a time, as little as possible; only if no single one is enough,
        all of them together, and which GPUs are meant last of all.
        """
        single = [
            self._with_less_memory(),
            replace(self.request, share=True),
            self._with_fewer(self.request),
        ]
        if self.request.ids is not None:
            single.append(replace(self.request, ids=None, count=self.wanted))
        works = [one for one in dict.fromkeys(single) if one != self.request and self._works(one)]
        if works:
            return works
        bare = replace(self.request, share=True, min_free_bytes=None, min_total_bytes=None)
        loosest = [self._with_fewer(one) for one in (bare, replace(bare, ids=None))]
        return [one for one in loosest if self._works(one)][:1]

    def _with_less_memory(self) -> Request:
        """Lower one memory condition to what the last of the wanted devices has, else both."""
        asked = self.request
        free, total = asked.min_free_bytes, asked.min_total_bytes
        for kept_free, kept_total in ((None, total), (free, None), (None, None)):
            bare = replace(asked, min_free_bytes=kept_free, min_total_bytes=kept_total)
            able = self._able(bare)
            if len(able) < self.wanted:
                continue
            lowered = replace(
                asked,
                min_free_bytes=self._lowered(free, [one.free_bytes for one in able]),
                min_total_bytes=self._lowered(total, [one.total_bytes for one in able]),
            )
            if self._works(lowered):
                return lowered
        return asked

    def _lowered(self, asked: int | None, have: Sequence[int | None]) -> int | None:
        last = sorted((one or 0 for one in have), reverse=True)[self.wanted - 1]
        return min(asked or 0, last) or None

    def _with_fewer(self, request: Request) -> Request:
        # One is worth a try even if there is none: alone, a MIG slice will do.
        return replace(request, count=max(min(len(self._able(request)), self.wanted), 1))

    def _able(self, request: Request) -> list[Device]:
        offered = candidates(self.node, request, self.environment)
        return [one for one in offered if obstacle(one, request, self.claims) is None]

    def _works(self, request: Request) -> bool:
        return len(self._able(request)) >= (request.count or self.wanted)

    def _why(self) -> str:
        node = self.node
        if not node.accelerators:
            known = "".join(f"; {one.what}" for one in node.findings)
            return f"no GPU can be seen on {node.hostname}{known}"
        shown = visible(node.accelerators, self.environment)
        ours = [one for one in node.accelerators if one.kind is node.main_kind]
        seen = [one for one in ours if one in shown.devices]
        slices = sum(one.mig_index is not None for one in seen)
        text = f"{node.hostname} has {plural(len(seen) - slices, 'GPU')}"
        if slices:
            text += f" and {plural(slices, 'MIG slice')} (one to a process)"
        if hidden := {shown.hidden_by[one.uuid] for one in ours if one.uuid in shown.hidden_by}:
            text += f" visible ({', '.join(sorted(hidden))})"
        blocked = [one for one in self.offered if one.uuid in self.obstacles]
        return text + (f"; {in_words(blocked, self.obstacles)}" if blocked else "")


# So many devices are told one by one; beyond, those in the same situation together.
_ONE_BY_ONE = 4


def in_words(devices: Sequence[Device], obstacles: Mapping[str, Obstacle]) -> str:
    """List what stands in the way: ``GPU 3 is in use by alice (pid 4242)``."""
    groups: dict[str, list[Device]] = {}
    for one in devices:
        found = obstacles[one.uuid]
        text = found.text if len(devices) <= _ONE_BY_ONE else found.brief
        groups.setdefault(text, []).append(one)
    return "; ".join(
        f"{label_all(group)} {'is' if len(group) == 1 else 'are'} {text}"
        for text, group in groups.items()
    )
