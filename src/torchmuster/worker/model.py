"""Create the model and the strategy that the settings describe."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from torchmuster.checkpoints.base_model import BaseModel, hash_weights
from torchmuster.config.image_folder import image_classes
from torchmuster.config.settings import Settings
from torchmuster.decision import Decision
from torchmuster.errors import Impossible, MusterError
from torchmuster.runfolder import RunFolder
from torchmuster.train.data.tokenizers import Tokenizer, TransformersTokenizer
from torchmuster.train.models import hugging_face, lora
from torchmuster.train.models.blocks import recompute_blocks
from torchmuster.train.models.factory import ModelRecipe, check_tokens, lost_updates
from torchmuster.train.models.meta_init import build_for, build_on_meta, build_whole
from torchmuster.train.models.parameters import peft_config
from torchmuster.train.precision import Precision
from torchmuster.train.strategies import choose as strategies
from torchmuster.train.strategies.sharding import Sharding
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.weights import replaced_folder
from torchmuster.train.world import World, all_gather_object, rank_zero_first
from torchmuster.units import format_bytes
from torchmuster.worker.data import TextData
from torchmuster.worker.reporting import rank_zero_log

_WORTH_A_LINE_BYTES = 2 * 10**9
_OF_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")


def recipe_of(settings: Settings) -> ModelRecipe:
    """Return how to create the model; download it if needed."""
    wanted, images = settings.model, settings.data.images
    files = None
    if wanted.model_name_or_path is not None:
        files = hugging_face.find_model(wanted.model_name_or_path)
    labels = None if images is None else image_classes(images)
    return ModelRecipe(
        files=files,
        build=wanted.build,
        dtype=wanted.torch_dtype or ("auto" if files is None else "float32"),
        lora=wanted.lora,
        load_in_4bit=wanted.load_in_4bit,
        labels=labels,
    )


def model_of(
    settings: Settings,
    recipe: ModelRecipe,
    text: TextData | None,
    number_type: Precision,
    world: World,
) -> tuple[nn.Module, Decision[Strategy]]:
    """Return the model and its strategy; for fsdp, only rank 0's model has values."""
    wanted, requested = settings.train, settings.distributed.strategy
    recipe.check()
    reasons: list[str] = []

    def sketch() -> nn.Module:
        made = recipe.sketch()
        reasons[:] = [made.reason]
        return made.value

    sketched = build_on_meta(sketch)
    if text is not None:
        check_tokens(
            getattr(sketched, "config", None),
            vocabulary=text.format.tokenizer.vocabulary,
            sequence_length=text.format.sequence_length,
        )
    sharding = _sharding(settings)
    packed = lora.weights_for_4_bits(sketched) if recipe.load_in_4bit else ()
    sizes = strategies.sizes_of(sketched, in_4_bits=packed)
    memory = strategies.memory_of_each_rank(world)
    name = strategies.choose_strategy(
        requested, ranks=world.world_size, sizes=sizes, memory_bytes=memory, sharding=sharding
    )
    is_sharded = name.value == "fsdp"
    if recipe.load_in_4bit:
        # With fsdp too, every rank loads all of it, to the host: the scales of weights in 4 bits
        # are no parameters, so a rank could not receive them from rank 0.
        place = "cpu" if is_sharded else str(world.device)
        recipe = replace(recipe, compute=number_type.compute, device=place)
        model = build_whole(lambda: recipe.model().value, seed=wanted.seed)
        footprint: Any = model
        size = format_bytes(footprint.get_memory_footprint())
        reasons.append(f"the linear layers are loaded in 4 bits (nf4): the model takes {size}")
    else:
        model = build_for(
            name.value, lambda: recipe.model().value, world, seed=wanted.seed, sketch=sketched
        )
    notes = [*recipe.reasons(), *reasons, lost_updates(model) if recipe.dtype == "auto" else ""]
    if wanted.activation_checkpointing != "none":
        notes.append(recompute_blocks(model, wanted.activation_checkpointing).reason)
    for reason in filter(None, notes):
        rank_zero_log(world, reason)
    strategy = strategies.build_strategy(
        name.value,
        world,
        precision=number_type,
        sharding=sharding if is_sharded else None,
        find_unused_parameters=settings.distributed.find_unused_parameters,
    )
    return model, Decision(value=strategy, reason=name.reason)


def _sharding(settings: Settings) -> Sharding | None:
    """Return the requested fsdp options; None if the file only repeats the defaults."""
    wanted = settings.distributed
    sharding = Sharding(
        kind=wanted.fsdp_sharding_strategy,
        shard_size=wanted.fsdp_shard_size,
        cpu_offload=wanted.fsdp_cpu_offload,
    )
    return None if sharding == Sharding() else sharding


def base_of(recipe: ModelRecipe, model: nn.Module, world: World, folder: Path) -> BaseModel | None:
    """Return the model whose frozen weights are in its files, and need not be saved; else None.

    One rank of each host hashes the files; all ranks call it. The hash of rank 0's is kept in the
    run folder.
    """
    files = recipe.files
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if files is None or not files.weights or not frozen:
        return None

    def before(size_bytes: int) -> None:
        if size_bytes >= _WORTH_A_LINE_BYTES:
            rank_zero_log(world, f"hashing the base model's files, {format_bytes(size_bytes)}")

    cache = RunFolder(folder).base_model if world.is_first else None
    found, problem = "", ""
    if world.local_rank == 0:
        try:
            found = hash_weights(files.weights, cache=cache, before=before)
        except OSError as error:
            problem = error.strerror or str(error)
    reports = all_gather_object([found, problem], world)
    for rank, (_, theirs) in enumerate(reports):
        if theirs:
            raise MusterError(f"rank {rank} cannot read the files of {files.name}", why=theirs)
    rest = [rank for rank, (report, _) in enumerate(reports) if report not in ("", reports[0][0])]
    if rest:
        raise Impossible(
            f"the hosts of rank 0 and rank {rest[0]} have different weights of {files.name}",
            why="the SHA-256 of their files differ, and frozen weights are read on each host",
            fix="copy or download the same files to all hosts",
        )
    dtype = "nf4" if recipe.load_in_4bit else recipe.dtype
    return BaseModel(name=files.name, revision=files.revision, dtype=dtype, sha256=reports[0][0])


def write_model_files(
    folder: Path, recipe: ModelRecipe, tokenizer: Tokenizer | None, model: nn.Module, world: World
) -> None:
    """Write the config of model or LoRA adapter, and the tokenizer; all ranks call it."""
    with rank_zero_first(world):
        if not world.is_first:
            return
        try:
            with replaced_folder(folder) as unfinished:
                if recipe.files is not None:
                    hugging_face.save_configs(recipe.files, unfinished, model, labels=recipe.labels)
                if recipe.lora is not None:
                    # Next to a config.json, an adapter would be taken for a whole model.
                    (unfinished / "config.json").unlink(missing_ok=True)
                    peft_config(model).save_pretrained(unfinished)
                _save_tokenizer(unfinished, recipe, tokenizer, world)
        except OSError as error:
            raise MusterError(
                f"cannot write the model's config and tokenizer to {folder}",
                why=error.strerror or str(error),
                fix="free disk space there, or use another folder for runs",
            ) from error


def _save_tokenizer(
    folder: Path, recipe: ModelRecipe, tokenizer: Tokenizer | None, world: World
) -> None:
    """Save the tokenizer used in training, else the one in the model's folder."""
    if isinstance(tokenizer, TransformersTokenizer):
        tokenizer.save(folder)
        return
    source = None if recipe.files is None else recipe.files.folder
    if source is None or not any(any(source.glob(kind)) for kind in _OF_TOKENIZERS):
        return
    try:
        hugging_face.save_tokenizer(hugging_face.load_tokenizer(str(source)), folder)
    except Impossible as error:
        rank_zero_log(
            world, f"no tokenizer will be saved with the weights: {error.what} ({error.why})"
        )
