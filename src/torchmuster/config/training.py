"""Check that the settings describe a training run that can start; report every contradiction."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torchmuster.config import fields
from torchmuster.config.resolve import Resolved
from torchmuster.config.settings import Checkpoint, Train
from torchmuster.errors import ConfigError, Mistake
from torchmuster.units import parse_seconds

# The settings that ranks need; all others have taken effect before the ranks start.
_FOR_RANKS = (
    *("model.", "data.", "train.", "checkpoint.", "metrics."),
    "experiment_name",  # trackers group runs by it
    *("distributed.strategy", "distributed.fsdp_", "distributed.find_unused_parameters"),
)

# One setting of each group names the model or the data.
_MODELS = ("model.model_name_or_path", "model.build")
_DATA = ("data.dataset", "data.files", "data.hugging_face", "data.images")
_AT_MOST_ONE = (
    _MODELS,
    _DATA,
    ("train.epochs", "train.steps"),
)
# Each of these names a function in the user's code.
FUNCTIONS = ("model.build", "model.loss", "data.dataset", "train.optimizer")
# The built-in values of settings that also take a function.
OWN_NAMES: dict[str, tuple[str, ...]] = {
    "model.loss": ("cross_entropy", "language_model", "classification"),
    "train.optimizer": ("adamw", "sgd"),
}
NEVER = "never"  # as checkpoint.every
# Each key needs the other setting.
_NEEDS = {
    "model.load_in_4bit": "model.lora",
    "data.images": "model.model_name_or_path",
    "checkpoint.keep_best": "data.evaluation",
}
COLUMNS = ("text", "messages", "prompt", "completion")


def paths_for_ranks() -> list[str]:
    """Return the settings that the ranks of a training run need."""
    return [path for path in fields.leaves() if path.startswith(_FOR_RANKS)]


def check_trainable(resolved: Resolved, *, file: str) -> None:
    """Raise a :class:`ConfigError` with every setting that prevents training.

    ``file`` is the location that is reported for missing settings.
    """
    if mistakes := [*_missing(resolved, file), *_contradictions(resolved)]:
        raise ConfigError(mistakes)


def check_consistent(resolved: Resolved) -> None:
    """Raise a :class:`ConfigError` with every setting that no training accepts, whatever is missing."""
    if mistakes := list(_contradictions(resolved)):
        raise ConfigError(mistakes)


def _missing(resolved: Resolved, file: str) -> Iterator[Mistake]:
    values = resolved.values()
    if not any(values[path] for path in _MODELS):
        yield Mistake(
            where=file,
            what="there is no model to train",
            fix="give model.model_name_or_path (a folder or a name on the hub), or model.build "
            "(module:function)",
        )
    if not any(values[path] for path in _DATA):
        yield Mistake(
            where=file,
            what="there is no data to train on",
            fix="give data.dataset (module:function), data.files, data.hugging_face or data.images",
        )
    text = values["data.files"] or values["data.hugging_face"]
    if text and values["model.build"] and not values["data.tokenizer"]:
        yield Mistake(
            where=file,
            what="text needs a tokenizer, and model.build does not provide one",
            fix="give data.tokenizer: bytes, a folder, or a name on the hub",
        )


def with_absolute_folder(resolved: Resolved) -> Resolved:
    """Return the settings with an absolute checkpoint folder.

    The run may be resumed from another working folder.
    """
    wanted = resolved.settings.checkpoint
    if wanted.folder is None or "://" in wanted.folder:
        return resolved
    folder = str(Path(wanted.folder).expanduser().absolute())
    settings = replace(resolved.settings, checkpoint=replace(wanted, folder=folder))
    return replace(resolved, settings=settings)


def saves_checkpoints(wanted: Checkpoint) -> bool:
    """Return whether a run saves checkpoints, from which it can resume."""
    return wanted.every != NEVER


def checkpoint_place(wanted: Checkpoint, run_folder: Path) -> str | None:
    """Return where a run's checkpoints are: a folder or a URL; None if it saves none."""
    if not saves_checkpoints(wanted):
        return None
    if wanted.folder is None:
        return str(run_folder / "checkpoints")
    # Each run has its own subfolder, so that no run resumes from another run's checkpoints.
    return f"{wanted.folder.rstrip('/')}/{run_folder.name}"


def _contradictions(resolved: Resolved) -> Iterator[Mistake]:
    values, sources = resolved.values(), resolved.sources

    def wrong(path: str, what: str, fix: str) -> Mistake:
        return Mistake(where=sources[path].where, what=f"{path} {what}", fix=fix)

    for group in _AT_MOST_ONE:
        first, *more = [path for path in group if values[path] is not None] or [""]
        for path in more:
            other = f"{first} ({sources[first].where})"
            yield wrong(path, f"and {other} are mutually exclusive", "give one of the two")
    for path, needed in _NEEDS.items():
        if values[path] and not values[needed]:
            yield wrong(path, f"needs {needed}", f"leave it out, or give {needed}")
    for path in functions_in(resolved):
        name, own = values[path], OWN_NAMES.get(path, ())
        if name is None or name in own:
            continue
        module, _, function = str(name).partition(":")
        if not module or not function:
            known = f" nor one of {', '.join(own)}" if own else ""
            fix = fields.suggest_name(str(name), own)
            yield wrong(
                path,
                f"is {name!r}, which is not module:function{known}",
                fix
                or "write the dotted module name, a colon and the function: my_project.models:make",
            )
    settings = resolved.settings
    model = settings.model
    rank = None if model.lora is None else model.lora.get("r")
    if model.lora is not None and (type(rank) is not int or rank < 1):
        what = f"needs r, a whole number of at least 1; this is {rank}"
        yield wrong("model.lora", what, "model.lora: {r: 16}")
    if model.load_in_4bit and model.build is not None:
        yield wrong(
            "model.load_in_4bit",
            f"needs weight files, but model.build ({sources['model.build'].where}) makes the model",
            "give model.model_name_or_path instead of model.build",
        )
    for name in settings.data.columns or {}:
        if name not in COLUMNS:
            what = f"has {name!r}, which is none of {', '.join(COLUMNS)}"
            yield wrong("data.columns", what, fields.suggest_name(name, COLUMNS))
    try:
        warmup_steps_of(settings.train, None)
    except ValueError as error:
        fix = "write a number of steps, or a share such as 3%"
        yield wrong("train.warmup", f"is {settings.train.warmup!r}: {error}", fix)
    every = settings.checkpoint.every
    try:
        if isinstance(every, str) and every != NEVER and parse_seconds(every) <= 0:
            raise ValueError("it must be longer than 0 s")
    except ValueError as error:
        fix = "write a number of steps, a duration such as 10min, or never"
        yield wrong("checkpoint.every", f"is {every!r}: {error}", fix)
    distributed = settings.distributed
    if not distributed.enabled and (distributed.num_gpus or 1) > 1:
        yield wrong(
            "distributed.num_gpus",
            f"is {distributed.num_gpus}, but distributed.enabled is false "
            f"({sources['distributed.enabled'].where}): one process uses one device",
            "leave out one of the two",
        )


def functions_in(resolved: Resolved) -> list[str]:
    """Return the settings that name a function in the user's code, or a built-in value."""
    if resolved.settings.data.dataset is None:
        return [*FUNCTIONS]
    return [*FUNCTIONS, "data.evaluation"]


def warmup_steps_of(train: Train, total_steps: int | None) -> int | None:
    """Return the length of the warm-up; None if it is a share of an unknown number of steps.

    Raises ``ValueError`` for a text that is not a share, such as 3%.
    """
    if isinstance(train.warmup, int):
        return train.warmup
    percent = float(train.warmup.removesuffix("%"))
    if not train.warmup.endswith("%") or not 0 <= percent <= 100:
        raise ValueError("a share is from 0% to 100%")
    return None if total_steps is None else math.ceil(percent * total_steps / 100)
