"""The largest micro-batch that really fits: the plan says where to look, trials on fresh ranks say what is true.

All ranks of a trial train a few steps with micro-batches of one size. A rank that runs out of memory ends its trial
for all, so the rank with the least room decides. That a larger micro-batch never takes less is relied on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class RankTrial:
    """What one rank met with in a trial."""

    rank: int
    ran_out: bool
    peak_bytes: int | None = None  # of tensors; None where it is not known
    limit_bytes: int | None = None  # what there was for them
    words: str = ""  # of the error, where memory ran out


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A micro-batch size that was tried, and the ranks that had something to say."""

    micro_batch_size: int
    fits: bool
    ranks: tuple[RankTrial, ...]

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch_size}: {self._words()}"

    def _words(self) -> str:
        if not self.fits:
            out = [one for one in self.ranks if one.ran_out]
            if not out:
                return "the machine's memory ran out, and the kernel killed a rank"
            limits = f" of {_size(out[0].limit_bytes)}" if out[0].limit_bytes else ""
            return f"{_ranks([one.rank for one in out])} ran out of memory{limits}"
        tightest = self.tightest
        if tightest is None or tightest.peak_bytes is None:
            return "fits on all ranks"
        of = f" of {_size(tightest.limit_bytes)}" if tightest.limit_bytes is not None else ""
        return f"fits on all ranks; rank {tightest.rank} has the least room: {_size(tightest.peak_bytes)}{of}"

    @property
    def tightest(self) -> RankTrial | None:
        """The rank that has the least room left; without limits, the one that takes most."""
        known = [one for one in self.ranks if one.peak_bytes is not None]
        return min(known, key=_room, default=None)


def _room(one: RankTrial) -> int:
    return (one.limit_bytes or 0) - (one.peak_bytes or 0)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The largest micro-batch that fits, None if not even one sample does; and how that is known."""

    micro_batch_size: int | None
    trials: tuple[Trial, ...]


class TryOne(Protocol):
    """Tries one size on fresh ranks."""

    def __call__(self, micro_batch_size: int) -> Trial:
        """Return what came of it."""


def find(
    try_one: TryOne,
    *,
    start: int,
    most: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Decision[Found]:
    """Find the largest micro-batch that fits, beginning with ``start``, what the plan expects.

    Tried are ``start``, powers of two and ``most``, none above it. Where the plan is right, two trials are enough:
    its size, and the next one.
    """
    trials: list[Trial] = []

    def fits(size: int) -> bool:
        trial = try_one(size)
        trials.append(trial)
        say(str(trial))
        return trial.fits

    size = _largest(fits, start=start, most=most)
    found = Found(micro_batch_size=size, trials=tuple(trials))
    return Decision(value=found, reason=_reason(found, start=start, most=most))


def largest_expected(fits: Callable[[int], bool], *, start: int, most: int | None) -> int:
    """Return the largest micro-batch that fits by a plan's arithmetic; at least 1, where a search can begin."""
    return _largest(fits, start=start, most=most) or 1


# Where nothing limits a micro-batch, what fits is not looked for beyond this.
_LARGEST_SIZE = 2**20


def _largest(fits: Callable[[int], bool], *, start: int, most: int | None) -> int | None:
    """Return the largest size that fits, None if one sample does not; from the start one size after the other."""
    if start < 1:
        raise Impossible(
            f"asked for a micro-batch of {start} samples", fix="give a number from 1 on"
        )
    last = most or _LARGEST_SIZE
    powers = {1 << power for power in range(last.bit_length())}
    sizes = sorted({*powers, min(start, last), last})
    place = sizes.index(min(start, last))
    if fits(sizes[place]):
        while place + 1 < len(sizes) and fits(sizes[place + 1]):
            place += 1
        return sizes[place]
    return next((size for size in reversed(sizes[:place]) if fits(size)), None)


def _reason(found: Found, *, start: int, most: int | None) -> str:
    size = found.micro_batch_size
    if size is None:
        first = next(one for one in found.trials if one.micro_batch_size == 1)
        return f"not even a micro-batch of 1 fits: {str(first).partition(': ')[2]}"
    how = next(one for one in found.trials if one.micro_batch_size == size)
    expected = "as planned" if size == start else f"the plan expected {start}"
    reason = f"a micro-batch of {size} ({expected}): it {str(how).partition(': ')[2]}"
    larger = [one for one in found.trials if not one.fits]
    if larger:
        nearest = min(larger, key=lambda one: one.micro_batch_size)
        return f"{reason}; with {nearest.micro_batch_size}, {str(nearest).partition(': ')[2]}"
    return f"{reason}; a step has no more than {most} for a rank" if most is not None else reason


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers))}"


def _size(count: int | None) -> str:
    return "an unknown size" if count is None else format_bytes(count)
