"""Notices a ``DistributedSampler`` whose epoch is never set, which gives the same order every time."""

import logging
import operator
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data.distributed import DistributedSampler

_log = logging.getLogger("torchmuster.distributed")
_torchs_own = DistributedSampler.__iter__


class _Watch:
    """What each sampler gave out last: the epoch, how many samples, and what is left of them."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[DistributedSampler[Any], tuple[int, int, Iterator[Any]]] = (
            WeakKeyDictionary()
        )
        self._told = False

    def note(self, sampler: DistributedSampler[Any], given: Iterator[Any]) -> None:
        last = self._last.get(sampler)
        self._last[sampler] = (sampler.epoch, len(sampler), given)
        if last is None or self._told:
            return
        epoch, count, left = last
        # Who only took a look at the first batch has not been through an epoch.
        if epoch == sampler.epoch and operator.length_hint(left) <= count // 2:
            self._told = True
            _log.warning(
                "the sampler gives the same order in every epoch: call sampler.set_epoch(epoch) before "
                "each epoch"
            )


def begin() -> None:
    """Watch the samplers of this process, until ``end``; warns once."""
    if DistributedSampler.__iter__ is not _torchs_own:
        return
    watch = _Watch()

    def watched(sampler: DistributedSampler[Any]) -> Iterator[Any]:
        given = _torchs_own(sampler)
        if sampler.shuffle:
            watch.note(sampler, given)
        return given

    DistributedSampler.__iter__ = watched  # type: ignore[method-assign]


def end() -> None:
    """Give torch's own back."""
    DistributedSampler.__iter__ = _torchs_own  # type: ignore[method-assign]
