"""Create the dataset, loaders and evaluation that the settings describe."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.config.settings import Settings
from torchmuster.decision import Decision
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


def images_of(place: str, recipe: ModelRecipe, world: World) -> ImageFolder:
    """Return a folder of images, processed as the model needs them."""
    assert recipe.files is not None, "images need a model with an image processor"
    assert recipe.labels is not None, "images have classes"
    processor = hugging_face.load_image_processor(recipe.files)
    with rank_zero_first(world, per="node"):  # the first rank lists the files
        return ImageFolder(place, processor, recipe.labels)


def text_of(settings: Settings, world: World, recipe: ModelRecipe | None) -> TextFormat | None:
    """Return how records become rows; None if the data is not text.

    Without a model (``recipe``), rows are packed unless ``data.pack`` is false.
    """
    with rank_zero_first(world, per="node"):  # the first rank downloads and converts
        records = open_records(settings)
        if records is None:
            return None
        text = text_format(settings, records)[0]
    if recipe is None:
        return text
    with rank_zero_first(world):
        problem = None
        if world.is_first and text.pack:
            problem = recipe.mixed_documents(text.tokenizer.vocabulary)
    (problem, *_) = all_gather_object(problem, world)
    text, reason = with_proven_packing(text, settings, lambda: problem)
    if reason:
        rank_zero_log(world, reason)
    return text


def text_format(settings: Settings, records: Records) -> tuple[TextFormat, str]:
    """Return how records become rows, and the reason for the format."""
    data = settings.data
    name = data.tokenizer or settings.model.model_name_or_path
    assert name is not None, "check_trainable refuses text without a tokenizer"
    record = record_format(settings)
    kind = record.recognize(next(iter(records.dataset), None), named=tuple(data.columns or ()))
    text = TextFormat(
        tokenizer=tokenizer_named(name),
        sequence_length=data.sequence_length,
        pack=data.pack is not False,
        record=replace(record, kind=kind.value),
    )
    return text, kind.reason


def with_proven_packing(
    text: TextFormat, settings: Settings, mixes: Callable[[], str | None]
) -> tuple[TextFormat, str]:
    """Turn packing off if the model mixes the documents of a row; return the reason, too.

    ``mixes`` tries the model. With ``data.pack: true`` such a model is refused.
    """
    if not text.pack:
        return text, ""
    problem = mixes()
    if problem is None:
        return text, ""
    if settings.data.pack:
        raise Impossible(
            "data.pack is true, but this model mixes the documents of a row",
            why=problem,
            fix="remove data.pack: each document then has rows of its own",
        )
    return replace(text, pack=False), f"data.pack is off: {problem}"


def record_format(settings: Settings) -> RecordFormat:
    """Return the fields of a record; what it holds is decided by the first record."""
    columns = settings.data.columns or {}
    fields: dict[str, Any] = {f"{name}_field": column for name, column in columns.items()}
    return RecordFormat(**fields)


def open_records(settings: Settings, *, to_evaluate: bool = False) -> Records | None:
    """Open the records to train or to evaluate on; None if the data is not text, or the settings have none."""
    data = settings.data
    if to_evaluate and data.evaluation is None:
        return None
    if data.files is not None and to_evaluate:
        return open_files(data.evaluation or (), record_format(settings))
    if data.files is not None:
        return open_files(data.files, record_format(settings), options=data.options)
    if data.hugging_face is None:
        return None
    options = dict(data.options or {})
    if to_evaluate:
        options["split"] = str(data.evaluation)
    return open_dataset(data.hugging_face, options)


def samples_of(
    settings: Settings,
    text: TextFormat | None,
    recipe: ModelRecipe | None,
    world: World,
    *,
    to_evaluate: bool = False,
) -> Any:
    """Return the dataset to train or to evaluate on."""
    data = settings.data
    if data.images is not None and recipe is not None:
        return images_of(str(data.evaluation) if to_evaluate else data.images, recipe, world)
    with rank_zero_first(world, per="node"):  # downloads and caches happen once on each host
        if data.dataset is not None:
            if to_evaluate:
                return factory.call_import(str(data.evaluation), "data.evaluation")
            return factory.call_import(data.dataset, "data.dataset")
        records = open_records(settings, to_evaluate=to_evaluate)
        assert records is not None
        assert text is not None
        # The rows are prepared, or those of a stream.
        return TextStream(records, text) if records.is_stream else rows_of(records, text)


def batches_of(
    settings: Settings, world: World, *, resumed: int | None
) -> Decision[dict[str, Any]]:
    """Return the options of the loader; ``kept`` is the global batch size of the resumed run.

    The global batch size stays the same on any number of ranks; if that required a change, the
    reason says so.
    """
    wanted = settings.train
    micro = wanted.micro_batch_size
    if wanted.global_batch_size is None and micro is None:
        micro = _USUAL_MICRO_BATCH_SIZE
    whole, reason = wanted.global_batch_size, ""
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
            reason = (
                f"the global batch size stays {resumed}, as in the resumed run; "
                f"the ranks compute at most {at_once} samples at once"
            )
    return Decision(
        value={
            "global_batch_size": whole,
            "micro_batch_size": micro,
            "seed": wanted.seed,
            "shuffle": settings.data.shuffle,
            "workers": settings.data.workers,
        },
        reason=reason,
    )


def describe_mixed_gpus(gpus: Sequence[tuple[str, int]]) -> str:
    """Return a note on the GPU with the least memory if the ranks' GPUs differ, else "".

    ``gpus`` has the name and the memory in bytes of each rank's GPU.
    """
    if len(set(gpus)) <= 1:
        return ""
    name, memory_bytes = min(gpus, key=lambda gpu: gpu[1])
    return (
        f"the ranks have different GPUs, and all use the same micro-batch size: it must fit the {name} "
        f"with {format_bytes(memory_bytes)}"
    )


def evaluation_of(
    settings: Settings,
    text: TextFormat | None,
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
        best_metric="loss" if settings.checkpoint.keep_best else None,
    )
