"""Changes of a training from settings: they are made by the settings, as a person would make them."""

import dataclasses
from collections.abc import Mapping

from torchmuster.bench.profile.changes import Change
from torchmuster.bench.profile.recording_words import Asked

_GLOBAL, _MICRO = "train.global_batch_size", "train.micro_batch_size"
_USUAL_MICRO_BATCH = 8  # what train.micro_batch_size is if nothing says it


def with_change(asked: Asked, change: Change) -> Asked:
    """Return the question about the training with a change.

    What settings can say is said by them; everything else, and every change of a script, is left to the recorder.
    """
    if not asked.with_run_folder:
        return dataclasses.replace(asked, changes=(change,))
    if change.kind == "workers":
        return _told(asked, {"data.workers": change.value})
    if change.kind == "bf16":
        return _told(asked, {"train.precision": "bf16"})
    if change.kind == "batch":
        return _told(asked, _batch(asked, change.value))
    return dataclasses.replace(asked, changes=(change,))


def _batch(asked: Asked, times: int) -> dict[str, int]:
    given = {
        path: int(value)
        for path, _, value in (word.partition("=") for word in asked.command)
        if path in (_GLOBAL, _MICRO) and value.isdecimal()
    }
    whole, micro = given.get(_GLOBAL), given.get(_MICRO)
    if whole is None:
        return {_MICRO: (micro or _USUAL_MICRO_BATCH) * times}
    # A batch that is computed in larger parts, not in more of them.
    own = max(1, whole // asked.ranks)
    return {_GLOBAL: whole * times, _MICRO: min(micro or _USUAL_MICRO_BATCH, own) * times}


def _told(asked: Asked, settings: Mapping[str, int | str]) -> Asked:
    words = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    return dataclasses.replace(asked, command=(*asked.command, *words))
