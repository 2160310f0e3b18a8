"""Create the model and the strategy that the settings describe."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from torchmuster.checkpoints.base_model import BaseModel, hash_weights
from torchmuster.config.image_folder import image_classes
from torchmuster.config.settings import Settings
from torchmuster.decision import Decision
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.tokenizers import Tokenizer, TransformersTokenizer
from torchmuster.train.models import hugging_face, lora
from torchmuster.train.models.blocks import compile_blocks, recompute_blocks
from torchmuster.train.models.factory import ModelRecipe, check_tokens
from torchmuster.train.models.meta_init import build_for, build_on_meta, build_whole
from torchmuster.train.models.parameters import parameter_counts, peft_config
from torchmuster.train.precision import Precision
from torchmuster.train.strategies import choose as strategies
from torchmuster.train.strategies.sharding import Sharding
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.weights import replaced_folder
from torchmuster.train.world import World, all_gather_object, rank_zero_first
from torchmuster.worker.data import TextData
from torchmuster.worker.reporting import rank_zero_log


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
    wanted = settings.train
    recipe.check()
    sketched = build_on_meta(recipe.sketch)
    if text is not None:
        check_tokens(
            getattr(sketched, "config", None),
            vocabulary=text.format.tokenizer.vocabulary,
            sequence_length=text.format.sequence_length,
        )
    sharding = Sharding(
        kind=settings.distributed.fsdp_sharding_strategy,
        cpu_offload=settings.distributed.fsdp_cpu_offload,
    )
    requested = None if sharding == Sharding() else sharding
    packed = lora.weights_for_4_bits(sketched) if recipe.load_in_4bit else ()
    name = strategies.choose_strategy(
        settings.distributed.strategy,
        ranks=world.world_size,
        sizes=strategies.sizes_of(sketched, in_4_bits=packed),
        memory_bytes=strategies.memory_of_each_rank(world),
        sharding=requested,
    )
    is_sharded = name.value == "fsdp"
    if recipe.load_in_4bit:
        # With fsdp too, every rank loads all of it, to the host: the scales of weights in 4 bits
        # are no parameters, so a rank could not receive them from rank 0.
        place = "cpu" if is_sharded else str(world.device)
        recipe = replace(recipe, compute=number_type.compute, device=place)
        model = build_whole(recipe.model, seed=wanted.seed)
    else:
        model = build_for(name.value, recipe.model, world, seed=wanted.seed, sketch=sketched)
    notes = recipe.reasons()
    if recipe.lora is not None:
        total, trained = parameter_counts(model)
        notes.append(
            f"LoRA rank {recipe.lora['r']}: {trained:,} of {total:,} parameters are trained"
        )
    if wanted.activation_checkpointing != "none":
        notes.append(recompute_blocks(model, wanted.activation_checkpointing).reason)
    if wanted.compile:
        notes.append(f"compiled modules: {compile_blocks(model)}")
    for note in notes:
        rank_zero_log(world, note)
    strategy = strategies.build_strategy(
        name.value,
        world,
        precision=number_type,
        sharding=requested if is_sharded else None,
        find_unused_parameters=settings.distributed.find_unused_parameters,
    )
    return model, Decision(value=strategy, reason=name.reason)


def base_of(recipe: ModelRecipe, model: nn.Module, world: World) -> BaseModel | None:
    """Return the model whose frozen weights are in its files, and need not be saved; else None.

    One rank of each host hashes the files; all ranks call it.
    """
    files = recipe.files
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if files is None or not files.weights or not frozen:
        return None
    found = problem = ""
    if world.local_rank == 0:
        try:
            found = hash_weights(files.weights)
        except OSError as error:
            problem = f"cannot read the files of {files.name}: {error.strerror or error}"
    reports = all_gather_object([found, problem], world)
    first = reports[0][0]
    for rank, (theirs, problem) in enumerate(reports):
        if problem:
            raise MusterError(f"rank {rank} {problem}")
        if theirs not in ("", first):  # frozen weights are read on each host
            raise Impossible(
                f"the hosts of rank 0 and rank {rank} have different weights of {files.name}",
                why="the SHA-256 of their files differ",
                fix="copy or download the same files to all hosts",
            )
    dtype = "nf4" if recipe.load_in_4bit else recipe.dtype
    return BaseModel(name=files.name, revision=files.revision, dtype=dtype, sha256=first)


def write_model_files(
    folder: Path, recipe: ModelRecipe, tokenizer: Tokenizer | None, model: nn.Module, world: World
) -> None:
    """Write the config of model or LoRA adapter, and the tokenizer; all ranks call it.

    The tokenizer is that of the data, else the one in the model's folder.
    """
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
                if isinstance(tokenizer, TransformersTokenizer):
                    tokenizer.save(unfinished)
                elif recipe.files is not None and recipe.labels is None:
                    with suppress(Impossible):  # the model's folder may have no tokenizer
                        source = str(recipe.files.folder)
                        hugging_face.load_tokenizer(source).save_pretrained(unfinished)
        except OSError as error:
            raise MusterError(
                f"cannot write the model's config and tokenizer to {folder}",
                why=error.strerror or str(error),
                fix="free disk space there, or use another folder for runs",
            ) from error
