"""Changes that can be tried on a training run without editing its script, and the results of trials.

The recorder applies a change inside the training process, so it affects only that process.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.errors import Impossible

_CLEAR_FROM = 1.1
_ENOUGH_RUNS = 3
Kind = Literal["workers", "batch", "reads", "buckets", "threads", "bf16", "saves"]
_WORDS: dict[Kind, str] = {
    "workers": "{} loader workers",
    "batch": "{} times the batch",
    "reads": "values read only every {} steps",
    "buckets": "gradients sent in buckets of {} MiB",
    "threads": "torch.set_num_threads({})",
    "bf16": "bf16 autocast",
    "saves": "only every {}th save",
}


@dataclass(frozen=True, kw_only=True)
class TriedChange:
    """One change; ``str()`` describes it, ``written`` is the form for ``--try``."""

    kind: Kind
    value: int = 1

    def __str__(self) -> str:
        return _WORDS[self.kind].format(self.value)

    @property
    def written(self) -> str:
        """The change in command-line form: ``workers=4``."""
        return f"{self.kind}={self.value}"


def parse_change(text: str) -> TriedChange:
    """Parse ``workers=4``."""
    name, _, number = text.partition("=")
    for kind in _WORDS:
        if kind == name and number.isdecimal() and 0 < int(number) < 100_000:
            return TriedChange(kind=kind, value=int(number))
    raise Impossible(
        f"unknown change {text!r}",
        why="known changes: " + ", ".join(f"{kind}=N" for kind in _WORDS),
        fix="--try workers=4",
    )


@dataclass(frozen=True, kw_only=True)
class ChangeTrial:
    """A training's seconds per step without and with a change, from alternating fresh processes.

    Each value is the median step of the slowest rank of one run. ``samples_factor`` is the increase
    of samples per step.
    """

    change: TriedChange
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    samples_factor: float = 1.0

    @property
    def gain(self) -> float:
        """The factor in samples/s with the change."""
        before_s, after_s = statistics.median(self.before_s), statistics.median(self.after_s)
        return before_s / after_s * self.samples_factor

    @property
    def low(self) -> float:
        """The gain between the best run without and the worst run with the change."""
        return min(self.before_s) / max(_undisturbed(self.after_s)) * self.samples_factor

    @property
    def high(self) -> float:
        """The gain between the worst run without and the best run with the change."""
        return max(_undisturbed(self.before_s)) / min(self.after_s) * self.samples_factor

    @property
    def is_unclear(self) -> bool:
        """Whether the best runs differ but others do not: a run may have been disturbed."""
        best = min(self.before_s) / min(self.after_s) * self.samples_factor
        return best >= _CLEAR_FROM and self.low <= 1.0


def _undisturbed(taken_s: Sequence[float]) -> Sequence[float]:
    """Return the runs without the slowest, if there are enough: other load only slows runs down."""
    return sorted(taken_s)[:-1] if len(taken_s) >= _ENOUGH_RUNS else taken_s
