"""Create the dataset, loaders and evaluation that the settings describe."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchmuster.config.image_folder import check_first_images, find_images
from torchmuster.config.settings import Settings
from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.data.formats import RecordFormat
from torchmuster.train.data.images import ImageFolder
from torchmuster.train.data.loader_factory import LoaderSpec, loader_for
from torchmuster.train.data.text import (
    DatasetData,
    FileData,
    TextRows,
    holds_tokens,
    open_dataset,
    tokenizer_named,
)
from torchmuster.train.losses import Loss, measured_loss
from torchmuster.train.models import factory, hugging_face
from torchmuster.train.models.factory import ModelRecipe
from torchmuster.train.trainer import Evaluation
from torchmuster.train.world import World, rank_zero_first
from torchmuster.units import format_bytes

_USUAL_MICRO_BATCH_SIZE = 8


def images_of(place: str, recipe: ModelRecipe, world: World) -> ImageFolder:
    """Return a folder of images, processed as the model needs them."""
    assert recipe.files is not None, "images need a model with an image processor"
    with rank_zero_first(world, per="node"):
        found = find_images(place, classes=recipe.labels)
        if world.local_rank == 0:
            check_first_images(found)
        return ImageFolder(found, hugging_face.load_image_processor(recipe.files))


def rows_of(settings: Settings, world: World) -> TextRows | None:
    """Return how records become rows; None if the data is not text."""
    if not (settings.data.files or settings.data.hugging_face):
        return None
    with rank_zero_first(world, per="node"):
        return text_rows(settings)[0]


def text_rows(settings: Settings) -> tuple[TextRows, str]:
    """Return how records become rows, and the reason for the format."""
    data = settings.data
    name = data.tokenizer or settings.model.model_name_or_path
    has_tokens = data.tokenizer is None and holds_tokens(data.files)
    tokenizer = None
    if not has_tokens and name is not None:
        tokenizer = tokenizer_named(name, chat_template=data.chat_template)
    how = RecordFormat(
        kind="text" if data.format == "auto" else data.format,
        text_field=data.text_field,
        messages_field=data.messages_field,
        prompt_field=data.prompt_field,
        completion_field=data.completion_field,
        train_on=data.train_on,
    )
    reason = f"data.format is {data.format}"
    if data.format == "auto" and not holds_tokens(data.files):
        first = next(iter(training_data(settings).records()), None)
        if first is not None and first.error is not None:
            raise first.error
        if first is not None:
            kind = how.recognize(first.value)
            how, reason = replace(how, kind=kind.value), kind.reason
    rows = TextRows(
        tokenizer=tokenizer,
        sequence_length=data.sequence_length,
        pack=data.pack,
        how=how,
        seed=settings.train.seed,
        shuffle=data.shuffle,
    )
    return rows, reason


def training_data(settings: Settings) -> FileData | DatasetData:
    """Return the records to train on."""
    if settings.data.files is not None:
        return FileData(settings.data.files)
    return _dataset_data(settings, settings.data.split)


def evaluation_data(settings: Settings) -> FileData | DatasetData | None:
    """Return the records to evaluate on; None if the settings have none."""
    if settings.data.evaluation_files is not None:
        return FileData(settings.data.evaluation_files)
    if settings.data.evaluation_split is not None:
        return _dataset_data(settings, settings.data.evaluation_split)
    return None


def _dataset_data(settings: Settings, split: str) -> DatasetData:
    data = settings.data
    assert data.hugging_face is not None
    dataset = open_dataset(
        data.hugging_face,
        split,
        config_name=data.config_name,
        revision=data.revision,
        streaming=data.streaming,
    )
    return DatasetData(dataset, f"{data.hugging_face} {split}")


def samples_of(settings: Settings, rows: TextRows | None, world: World) -> Any:
    """Return the dataset."""
    data = settings.data
    with rank_zero_first(world, per="node"):  # downloads and caches happen once on each host
        if data.dataset is not None:
            return factory.call_import(data.dataset, "data.dataset")
        assert rows is not None
        if data.files is not None and holds_tokens(data.files):
            return rows.of_files(data.files)
        return rows.of_data(training_data(settings))


def batches_of(settings: Settings, world: World, *, kept: int | None) -> Decision[LoaderSpec]:
    """Return the batch sizes; ``kept`` is the global batch size of the resumed run.

    The global batch size stays the same on any number of ranks; if that required a change, the
    reason says so.
    """
    wanted = settings.train
    micro = wanted.micro_batch_size
    if wanted.global_batch_size is None and micro is None:
        micro = _USUAL_MICRO_BATCH_SIZE
    whole, reason = wanted.global_batch_size, ""
    if kept is not None and whole not in (None, kept):
        raise Impossible(
            f"train.global_batch_size is {whole}, but the run was started with {kept}",
            why="a resumed run must keep its global batch size",
            fix=f"set train.global_batch_size={kept}, or start a new run",
        )
    if whole is None and kept is not None:
        at_once = (micro or 0) * world.world_size
        whole = kept
        if at_once != kept:
            reason = (
                f"the global batch size stays {kept}, as in the resumed run; "
                f"the ranks compute at most {at_once} samples at once"
            )
    return Decision(
        value=LoaderSpec(
            global_batch_size=whole,
            micro_batch_size=micro,
            seed=wanted.seed,
            shuffle=settings.data.shuffle,
            workers=settings.data.workers,
        ),
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
    rows: TextRows | None,
    batches: LoaderSpec,
    loss: Loss,
    world: World,
    *,
    images: ImageFolder | None = None,
) -> Evaluation | None:
    """Return what to evaluate, and when; None if the settings have no evaluation."""
    data = settings.data
    given = (data.evaluation_dataset, data.evaluation_files, data.evaluation_split)
    if given == (None, None, None) and images is None:
        return None
    with rank_zero_first(world, per="node"):
        if images is not None:
            samples: Any = images
        elif data.evaluation_dataset is not None:
            samples = factory.call_import(data.evaluation_dataset, "data.evaluation_dataset")
        else:
            assert rows is not None
            if data.evaluation_files is not None and holds_tokens(data.evaluation_files):
                samples = rows.in_order().of_files(data.evaluation_files)
            else:
                records = evaluation_data(settings)
                assert records is not None
                samples = rows.in_order().of_data(records)
    loader = loader_for(samples, world, batches.in_order())
    # By default: after each epoch, or once at the end if the run is limited by steps.
    every = settings.train.evaluate_every or settings.train.steps
    return Evaluation(loader=loader, measure=measured_loss(loss), every=every)
