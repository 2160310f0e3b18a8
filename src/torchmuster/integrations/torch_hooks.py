"""Detect steps, batches and checkpoints through torch itself, which every script uses.

Each function gets the module of torch that was just imported, and uses only its public names.
"""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torchmuster.integrations.import_hooks import when_imported
from torchmuster.integrations.recorder import Recorder

_MOST_LOOKED_AT = 8  # entries of a batch in which the number of samples is looked for


def watch_torch(recorder: Recorder) -> None:
    """Record steps, batches and saves, from when the script imports torch's modules."""
    when_imported("torch.optim.optimizer", lambda module: _watch_steps(module, recorder))
    when_imported("torch.utils.data.dataloader", lambda module: _watch_batches(module, recorder))
    when_imported("torch", lambda module: _watch_saves(module, recorder))
    when_imported(
        "torch.distributed.checkpoint", lambda module: _watch_sharded_saves(module, recorder)
    )


def _watch_steps(module: ModuleType, recorder: Recorder) -> None:
    def stepped(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        recorder.optimizer_stepped(optimizer)

    module.register_optimizer_step_post_hook(stepped)


def _watch_batches(module: ModuleType, recorder: Recorder) -> None:
    """Time the iterators of DataLoader: there is no hook for them, so their ``__next__`` is wrapped."""
    loader, wrapped = module.DataLoader, set()
    make_iterator = loader.__iter__

    @functools.wraps(make_iterator)
    def iterate(self: Any) -> Any:
        iterator = make_iterator(self)
        kind = type(iterator)
        if kind not in wrapped:
            wrapped.add(kind)
            kind.__next__ = _timed(kind.__next__, recorder)
        return iterator

    loader.__iter__ = iterate


def _timed(read: Callable[[Any], Any], recorder: Recorder) -> Callable[[Any], Any]:
    @functools.wraps(read)
    def timed(self: Any) -> Any:
        began = time.perf_counter()
        batch = read(self)
        with contextlib.suppress(Exception):
            recorder.batch_read(id(self), time.perf_counter() - began, samples_of(batch))
        return batch

    return timed


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor; 0 if unknown."""
    for value in _entries(batch):
        shape = getattr(value, "shape", None)
        if shape:
            return int(shape[0])
    return 0


def _entries(batch: Any) -> Iterator[Any]:
    if hasattr(batch, "shape"):
        yield batch
        return
    # Only containers that can be read twice: reading an iterator would take the script's samples.
    if isinstance(batch, Mapping):
        yield from itertools.islice(batch.values(), _MOST_LOOKED_AT)
    elif isinstance(batch, list | tuple):
        yield from batch[:_MOST_LOOKED_AT]


def _watch_saves(torch: ModuleType, recorder: Recorder) -> None:
    save = torch.save

    @functools.wraps(save)
    def recorded(obj: Any, f: Any, *arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        result = save(obj, f, *arguments, **keywords)
        if isinstance(f, str | os.PathLike):
            with contextlib.suppress(Exception):
                recorder.file_saved(os.fspath(f), time.perf_counter() - began)
        return result

    torch.save = recorded  # type: ignore[attr-defined]


def _watch_sharded_saves(module: ModuleType, recorder: Recorder) -> None:
    save = module.save

    @functools.wraps(save)
    def recorded(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        result = save(*arguments, **keywords)
        with contextlib.suppress(Exception):
            place = keywords.get("checkpoint_id") or next(
                (one for one in arguments[1:] if isinstance(one, str | os.PathLike)), None
            )
            writer = keywords.get("storage_writer")
            place = place or getattr(writer, "path", None)
            if place is not None:
                took_s = time.perf_counter() - began
                recorder.saved(os.fspath(place), library="DCP", seconds=took_s)
        return result

    module.save = recorded  # type: ignore[attr-defined]
