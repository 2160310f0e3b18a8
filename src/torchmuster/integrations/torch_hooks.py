"""Detect steps, batches and checkpoints through torch itself, which every script uses.

Each function gets the module of torch that was just imported, and uses only its public names.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torchmuster.integrations.import_hooks import when_imported
from torchmuster.integrations.recorder import Recorder
from torchmuster.integrations.wrap import Call, wrap

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
    wrapped = set()

    def read(call: Call) -> None:
        samples = samples_of(call.result)
        recorder.batch_read(id(call.arguments["self"]), call.seconds, samples)

    def iterated(call: Call) -> None:
        kind = type(call.result)
        if kind not in wrapped:
            wrapped.add(kind)
            wrap(kind, "__next__", after=read)

    wrap(module.DataLoader, "__iter__", after=iterated)


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
    def saved(call: Call) -> None:
        file = call.arguments["f"]
        if isinstance(file, str | os.PathLike):
            recorder.file_saved(os.fspath(file), call.seconds)

    def renamed(call: Call) -> None:
        recorder.renamed(os.fspath(call.arguments["src"]), os.fspath(call.arguments["dst"]))

    wrap(torch, "save", after=saved)
    for name in ("replace", "rename"):
        wrap(os, name, after=renamed)


def _watch_sharded_saves(module: ModuleType, recorder: Recorder) -> None:
    def saved(call: Call) -> None:
        writer = call.arguments.get("storage_writer")
        place = call.arguments.get("checkpoint_id") or getattr(writer, "path", None)
        if place is not None:
            recorder.saved(os.fspath(place), library="DCP", seconds=call.seconds)

    wrap(module, "save", after=saved)
