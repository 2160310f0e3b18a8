"""Create the dataset, loaders and evaluation that the settings describe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchmuster.config.settings import Settings
from torchmuster.errors import Impossible
from torchmuster.train.data.formats import RecordFormat
from torchmuster.train.data.images import ImageFolder
from torchmuster.train.data.loader_factory import loader_for
from torchmuster.train.data.text import (
    Records,
    TextFormat,
    TextStream,
    open_dataset,
    open_files,
    rows_of,
)
from torchmuster.train.data.tokenizers import tokenizer_named
from torchmuster.train.losses import Loss, measured_loss
from torchmuster.train.models import factory, hugging_face
from torchmuster.train.models.factory import ModelRecipe
from torchmuster.train.trainer import Evaluation
from torchmuster.train.world import World, all_gather_object, rank_zero_first
from torchmuster.units import format_bytes
from torchmuster.worker.reporting import rank_zero_log

_USUAL_MICRO_BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text records to train and to evaluate on, and how they become rows."""

    records: Records
    evaluation: Records | None
    format: TextFormat
    reason: str  # for the kind of record


def open_text(settings: Settings) -> TextData | None:
    """Open the text that the settings name; None if the data is not text.

    The first record decides what all records hold. Rows are packed unless data.pack is false.
    """
    data = settings.data
    columns = data.columns or {}
    fields: dict[str, Any] = {f"{name}_field": column for name, column in columns.items()}
    record = RecordFormat(**fields)
    options = data.options or {}
    evaluation = None
    if data.files is not None:
        records = open_files(data.files, record, options=options)
        if data.evaluation is not None:
            evaluation = open_files(data.evaluation, record, options={**options, "split": "train"})
    elif data.hugging_face is not None:
        records = open_dataset(data.hugging_face, options)
        if data.evaluation is not None:
            evaluation = open_dataset(data.hugging_face, {**options, "split": str(data.evaluation)})
    else:
        return None
    name = data.tokenizer or settings.model.model_name_or_path
    assert name is not None, "check_trainable refuses text without a tokenizer"
    kind = record.recognize(next(iter(records.dataset), {}), named=tuple(columns))
    text = TextFormat(
        tokenizer=tokenizer_named(name),
        sequence_length=data.sequence_length,
        pack=data.pack is not False,
        record=replace(record, kind=kind.value),
    )
    return TextData(records=records, evaluation=evaluation, format=text, reason=kind.reason)


def text_of(settings: Settings, world: World, recipe: ModelRecipe | None) -> TextData | None:
    """Open the text on all ranks; rows are packed only if the model keeps their documents apart.

    Without a model (``recipe``), rows are packed unless ``data.pack`` is false.
    """
    with rank_zero_first(world, per="node"):  # the first rank downloads and converts
        text = open_text(settings)
    if text is None or recipe is None or not text.format.pack:
        return text
    problem = None
    with rank_zero_first(world):
        if world.is_first:
            problem = recipe.mixed_documents(text.format.tokenizer.vocabulary)
    (problem, *_) = all_gather_object(problem, world)
    if problem is None:
        return text
    rank_zero_log(world, f"data.pack is off: {problem}")
    return replace(text, format=unpacked(text.format, settings, problem))


def unpacked(text: TextFormat, settings: Settings, problem: str) -> TextFormat:
    """Turn packing off for a model that mixes the documents of a row; refuse ``data.pack: true``."""
    if settings.data.pack:
        raise Impossible(
            "data.pack is true, but this model mixes the documents of a row",
            why=problem,
            fix="remove data.pack: each document then has rows of its own",
        )
    return replace(text, pack=False)


def samples_of(
    settings: Settings,
    text: TextData | None,
    recipe: ModelRecipe | None,
    world: World,
    *,
    to_evaluate: bool = False,
) -> Any:
    """Return the dataset to train or to evaluate on."""
    data = settings.data
    with rank_zero_first(world, per="node"):  # downloads and caches happen once on each host
        if data.images is not None:
            assert recipe is not None, "check_trainable refuses images without a model"
            assert recipe.files is not None, "check_trainable refuses images without a model"
            assert recipe.labels is not None, "images have classes"
            folder = str(data.evaluation) if to_evaluate else data.images
            processor = hugging_face.load_image_processor(recipe.files)
            return ImageFolder(folder, processor, recipe.labels)
        if text is None:
            name, setting = data.dataset, "data.dataset"
            if to_evaluate:
                name, setting = str(data.evaluation), "data.evaluation"
            return factory.call_import(str(name), setting)
        records = text.evaluation if to_evaluate else text.records
        assert records is not None
        if not records.is_stream:
            return rows_of(records, text.format)
        is_shuffled = data.shuffle and not to_evaluate
        return TextStream(records, text.format, seed=settings.train.seed if is_shuffled else None)


def batches_of(settings: Settings, world: World, *, resumed: int | None) -> dict[str, Any]:
    """Return the options of the loader; ``resumed`` is the global batch size of the resumed run.

    The global batch size stays the same on any number of ranks.
    """
    wanted = settings.train
    micro = wanted.micro_batch_size
    if wanted.global_batch_size is None and micro is None:
        micro = _USUAL_MICRO_BATCH_SIZE
    whole = wanted.global_batch_size
    if resumed is not None and whole not in (None, resumed):
        raise Impossible(
            f"train.global_batch_size is {whole}, but the run was started with {resumed}",
            why="a resumed run must keep its global batch size",
            fix=f"set train.global_batch_size={resumed}, or start a new run",
        )
    if whole is None and resumed is not None:
        at_once = (micro or 0) * world.world_size
        whole = resumed
        if at_once != resumed:
            rank_zero_log(
                world,
                f"the global batch size stays {resumed}, as in the resumed run; "
                f"the ranks compute at most {at_once} samples at once",
            )
    return {
        "global_batch_size": whole,
        "micro_batch_size": micro,
        "seed": wanted.seed,
        "shuffle": settings.data.shuffle,
        "workers": settings.data.workers,
    }


def describe_mixed_gpus(gpus: Sequence[tuple[str, int]]) -> str | None:
    """Return a note on the GPU with the least memory if the ranks' GPUs differ.

    ``gpus`` has the name and the memory in bytes of each rank's GPU.
    """
    name, memory_bytes = min(gpus, key=lambda gpu: gpu[1])
    if all(gpu == (name, memory_bytes) for gpu in gpus):
        return None
    return (
        f"the ranks have different GPUs, and all use the same micro-batch size: it must fit the {name} "
        f"with {format_bytes(memory_bytes)}"
    )


def evaluation_of(
    settings: Settings,
    text: TextData | None,
    recipe: ModelRecipe,
    batches: dict[str, Any],
    loss: Loss,
    world: World,
) -> Evaluation | None:
    """Return what to evaluate, and when; None if the settings have no evaluation."""
    if settings.data.evaluation is None:
        return None
    samples = samples_of(settings, text, recipe, world, to_evaluate=True)
    loader = loader_for(samples, world, **{**batches, "shuffle": False})
    # By default: after each epoch, or once at the end if the run is limited by steps.
    every = settings.train.evaluate_every or settings.train.steps
    return Evaluation(
        loader=loader,
        measure=measured_loss(loss),
        every=every,
    )
