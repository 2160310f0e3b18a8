"""Check that the settings describe a training run that can start; report every contradiction."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

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
    "model.loss": ("cross_entropy", "language_model", "masked_language_model", "classification"),
    "train.optimizer": ("adamw", "sgd"),
}
NEVER = "never"  # as checkpoint.every
# The data sources whose records are text.
_TEXT = ("data.files", "data.hugging_face")
# Each key has an effect only if one of its values is given.
_NEEDS = {
    "model.load_in_4bit": ("model.lora",),
    "data.options": _TEXT,
    "data.columns": _TEXT,
    "data.tokenizer": _TEXT,
    "data.sequence_length": _TEXT,
    "data.pack": _TEXT,
    "data.images": ("model.model_name_or_path",),
    "train.evaluate_every": ("data.evaluation",),
    "checkpoint.keep_best": ("data.evaluation",),
}
# Each key has an effect only if the setting has one of the values.
_ONLY_WITH = {
    "train.min_learning_rate": (
        "train.schedule",
        ("linear", "cosine", "warmup_stable_decay"),
    ),
}
# The optimizer options that each optimizer has, with what a value must be.
OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps"),
    "sgd": ("momentum",),
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
    values = resolved.values()
    for group in _AT_MOST_ONE:
        first, *more = [path for path in group if values[path] is not None] or [""]
        for path in more:
            where = resolved.sources[first].where
            yield Mistake(
                where=resolved.sources[path].where,
                what=f"{path} and {first} ({where}) are mutually exclusive",
                fix="give one of the two",
            )
    for path, needed in _NEEDS.items():
        # A file may list defaults, as the one in a run folder does: they have no effect.
        is_default = values[path] in (None, fields.leaves()[path].default)
        if is_default or any(values[setting] for setting in needed):
            continue
        yield Mistake(
            where=resolved.sources[path].where,
            what=f"{path} has no effect without {' or '.join(needed)}",
            fix=f"leave it out, or give {needed[0]}",
        )
    for path, (other, useful) in _ONLY_WITH.items():
        if values[path] in (None, fields.leaves()[path].default) or values[other] in useful:
            continue
        shown = " or ".join(str(value).lower() for value in useful)
        yield Mistake(
            where=resolved.sources[path].where,
            what=f"{path} has no effect with {other}: {str(values[other]).lower()}",
            fix=f"leave it out, or use {other}: {shown}",
        )
    yield from _no_functions(resolved)
    yield from _lora(resolved)
    yield from _batch_sizes(resolved)
    yield from _learning_rates(resolved)
    yield from _optimizers(resolved)
    yield from _training_times(resolved)
    distributed = resolved.settings.distributed
    if not distributed.enabled and (distributed.num_gpus or 1) > 1:
        yield Mistake(
            where=resolved.sources["distributed.num_gpus"].where,
            what=f"distributed.num_gpus is {distributed.num_gpus}, but distributed.enabled is false "
            f"({resolved.sources['distributed.enabled'].where}): one process uses one device",
            fix="leave out one of the two",
        )


def functions_in(resolved: Resolved) -> list[str]:
    """Return the settings that name a function in the user's code, or a built-in value."""
    if resolved.settings.data.dataset is None:
        return [*FUNCTIONS]
    return [*FUNCTIONS, "data.evaluation"]


def _no_functions(resolved: Resolved) -> Iterator[Mistake]:
    values = resolved.values()
    for path in functions_in(resolved):
        name = values[path]
        own = OWN_NAMES.get(path, ())
        if name is None or name in own:
            continue
        module, _, function = str(name).partition(":")
        if not module or not function:
            known = f" nor one of {', '.join(own)}" if own else ""
            similar = fields.suggest_name(str(name), own)
            yield Mistake(
                where=resolved.sources[path].where,
                what=f"{path} is {name!r}, which is not module:function{known}",
                fix=similar
                or "write the dotted module name, a colon and the function: my_project.models:make",
            )


def _lora(resolved: Resolved) -> Iterator[Mistake]:
    model = resolved.settings.model
    rank = None if model.lora is None else model.lora.get("r")
    if model.lora is not None and (type(rank) is not int or rank < 1):
        yield Mistake(
            where=resolved.sources["model.lora"].where,
            what=f"model.lora needs r, a whole number of at least 1; this is {rank}",
            fix="model.lora: {r: 16}",
        )
    if model.load_in_4bit and model.build is not None:
        yield Mistake(
            where=resolved.sources["model.load_in_4bit"].where,
            what=f"model.load_in_4bit needs weight files to load, but model.build "
            f"({resolved.sources['model.build'].where}) makes the model",
            fix="give model.model_name_or_path instead of model.build, or leave out "
            "model.load_in_4bit",
        )


def _batch_sizes(resolved: Resolved) -> Iterator[Mistake]:
    train = resolved.settings.train
    micro, whole = train.micro_batch_size, train.global_batch_size
    if micro is not None and whole is not None and micro > whole:
        yield Mistake(
            where=resolved.sources["train.micro_batch_size"].where,
            what=f"train.micro_batch_size is {micro}, but a step has only {whole} samples "
            f"({resolved.sources['train.global_batch_size'].where})",
            fix="reduce the micro-batch, or increase the global batch",
        )


def _learning_rates(resolved: Resolved) -> Iterator[Mistake]:
    train = resolved.settings.train
    try:
        warmup = warmup_steps_of(train, train.steps)
    except ValueError as error:
        yield Mistake(
            where=resolved.sources["train.warmup"].where,
            what=f"train.warmup is {train.warmup!r}: {error}",
            fix="write a number of steps, or a share such as 3%",
        )
        return
    if train.steps is not None and warmup is not None and warmup > train.steps:
        yield Mistake(
            where=resolved.sources["train.warmup"].where,
            what=f"train.warmup is {train.warmup}, but there are only {train.steps} "
            f"steps ({resolved.sources['train.steps'].where})",
            fix="use fewer warm-up steps: 10 % of all steps is usual",
        )
    if train.min_learning_rate >= train.learning_rate:
        yield Mistake(
            where=resolved.sources["train.min_learning_rate"].where,
            what=f"train.min_learning_rate is {train.min_learning_rate:g}, but train.learning_rate is "
            f"{train.learning_rate:g} ({resolved.sources['train.learning_rate'].where})",
            fix="give a lower one",
        )


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


def _optimizers(resolved: Resolved) -> Iterator[Mistake]:
    known = OPTIMIZER_OPTIONS.get(resolved.settings.train.optimizer)
    if known is not None:  # a function of the user's has its own
        yield from _unknown_keys(resolved, "train.optimizer_options", known)
    yield from _unknown_keys(resolved, "data.columns", COLUMNS)
    checkpoint = resolved.settings.checkpoint
    if checkpoint.keep_best and not saves_checkpoints(checkpoint):
        yield Mistake(
            where=resolved.sources["checkpoint.keep_best"].where,
            what="checkpoint.keep_best has no effect with checkpoint.every: never",
            fix="leave out one of the two",
        )


def _unknown_keys(resolved: Resolved, path: str, known: Sequence[str]) -> Iterator[Mistake]:
    options = cast(Mapping[str, object], resolved.values()[path] or {})
    for name in options:
        if name not in known:
            names = ", ".join(known) or "none"
            yield Mistake(
                where=resolved.sources[path].where,
                what=f"{path} has {name!r}, which is not one of its options here: {names}",
                fix=fields.suggest_name(name, known) or "leave it out",
            )


def _training_times(resolved: Resolved) -> Iterator[Mistake]:
    every = resolved.settings.checkpoint.every
    if isinstance(every, int) or every == NEVER:
        return
    try:
        too_short = parse_seconds(every) <= 0
        what = f"checkpoint.every is {every!r}, which is not greater than 0 s"
    except ValueError as error:
        too_short, what = True, f"checkpoint.every: {error}"
    if too_short:
        yield Mistake(
            where=resolved.sources["checkpoint.every"].where,
            what=what,
            fix="write a number of steps, a duration such as 10min, or never",
        )
