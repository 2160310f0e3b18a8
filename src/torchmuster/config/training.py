"""Check that the settings describe a training run that can start; report every contradiction."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torchmuster.config import fields
from torchmuster.config.resolve import Resolved
from torchmuster.config.settings import Checkpoint
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
    ("data.evaluation_dataset", "data.evaluation_files", "data.evaluation_images"),
    ("train.epochs", "train.steps"),
    ("train.micro_batch_size", "train.micro_batch_sizes"),
)
# Each of these names a function in the user's code.
FUNCTIONS = ("model.build", "model.loss", "data.dataset", "data.evaluation_dataset")
# Built-in values of model.loss.
OWN_LOSSES = ("cross_entropy", "language_model", "masked_language_model", "classification")
# Each key has an effect only if one of its values is given.
_NEEDS = {
    "model.lora_alpha": ("model.lora_rank",),
    "model.lora_targets": ("model.lora_rank",),
    "model.attention": ("model.model_name_or_path",),
    "data.split": ("data.hugging_face",),
    "data.text_field": ("data.files", "data.hugging_face"),
    "data.tokenizer": ("data.files", "data.hugging_face"),
    "data.sequence_length": ("data.files", "data.hugging_face"),
    "data.pack": ("data.files", "data.hugging_face"),
    "data.evaluation_files": ("data.files", "data.hugging_face"),
    "data.images": ("model.model_name_or_path",),
    "data.evaluation_images": ("data.images",),
    "train.evaluate_every": (
        "data.evaluation_dataset",
        "data.evaluation_files",
        "data.evaluation_images",
    ),
}


def paths_for_ranks() -> list[str]:
    """Return the settings that the ranks of a training run need."""
    return [path for path in fields.leaves() if path.startswith(_FOR_RANKS)]


def check_trainable(resolved: Resolved, *, file: str) -> None:
    """Raise a :class:`ConfigError` with every setting that prevents training.

    ``file`` is the location that is reported for missing settings.
    """
    if mistakes := [*_missing(resolved, file), *_contradictions(resolved)]:
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
    has_tokens = str(text).endswith(".safetensors")  # already tokenized
    if text and not has_tokens and values["model.build"] and not values["data.tokenizer"]:
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


def checkpoint_place(wanted: Checkpoint, run_folder: Path) -> str | None:
    """Return where a run's checkpoints are: a folder or a URL; None if it saves none."""
    if not wanted.enabled:
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
        if is_default or any(values[one] for one in needed):
            continue
        yield Mistake(
            where=resolved.sources[path].where,
            what=f"{path} has no effect without {' or '.join(needed)}",
            fix=f"leave it out, or give {needed[0]}",
        )
    yield from _no_functions(resolved)
    yield from _batch_sizes(resolved)
    yield from _training_times(resolved)
    yield from _open_passwords(resolved)
    distributed = resolved.settings.distributed
    if not distributed.enabled and (distributed.num_gpus or 1) > 1:
        yield Mistake(
            where=resolved.sources["distributed.num_gpus"].where,
            what=f"distributed.num_gpus is {distributed.num_gpus}, but distributed.enabled is false "
            f"({resolved.sources['distributed.enabled'].where}): one process uses one device",
            fix="leave out one of the two",
        )


def _no_functions(resolved: Resolved) -> Iterator[Mistake]:
    values = resolved.values()
    for path in FUNCTIONS:
        name = values[path]
        if name is None or (path == "model.loss" and name in OWN_LOSSES):
            continue
        module, _, function = str(name).partition(":")
        if not module or not function:
            known = f" nor one of {', '.join(OWN_LOSSES)}" if path == "model.loss" else ""
            yield Mistake(
                where=resolved.sources[path].where,
                what=f"{path} is {name!r}, which is not module:function{known}",
                fix="write the dotted module name, a colon and the function: my_project.models:make",
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
    if train.steps is not None and train.warmup_steps > train.steps:
        yield Mistake(
            where=resolved.sources["train.warmup_steps"].where,
            what=f"train.warmup_steps is {train.warmup_steps}, but there are only {train.steps} "
            f"steps ({resolved.sources['train.steps'].where})",
            fix="use fewer warm-up steps: 10 % of all steps is usual",
        )


def _open_passwords(resolved: Resolved) -> Iterator[Mistake]:
    uri = resolved.settings.metrics.mlflow_uri
    if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
        yield Mistake(
            where=resolved.sources["metrics.mlflow_uri"].where,
            what="metrics.mlflow_uri contains a user name or a password, which commands and logs "
            "would show",
            fix="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in rank 0's environment "
            "instead",
        )


def _training_times(resolved: Resolved) -> Iterator[Mistake]:
    every = resolved.settings.checkpoint.every
    if isinstance(every, int):
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
            fix="write a number of steps, or a duration such as 10min",
        )
