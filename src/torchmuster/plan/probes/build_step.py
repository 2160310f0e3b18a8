"""Build a training run from plain values, as ``muster train`` builds it from settings.

Used for real steps, and for traced steps without memory (``fake_process_group.py``).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.data import default_collate

from torchmuster.config.image_folder import image_classes
from torchmuster.errors import Impossible
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes import four_bit
from torchmuster.plan.probes.fake_process_group import forget_values, values_matter
from torchmuster.train import losses, optimizers
from torchmuster.train.data.images import ImageFolder
from torchmuster.train.data.pytree import move_to_device
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.models import factory, hugging_face, lora
from torchmuster.train.models.blocks import recompute_blocks, repeated_blocks
from torchmuster.train.models.factory import ModelRecipe, check_tokens
from torchmuster.train.models.meta_init import build_for, build_on_meta
from torchmuster.train.precision import PRECISIONS, Precision
from torchmuster.train.step import StepResult, TrainStep
from torchmuster.train.strategies import choose as strategies
from torchmuster.train.strategies.sharding import Kind, Sharding
from torchmuster.train.world import World

# Arbitrary values: the plan does not depend on them.
_LEARNING_RATE, _WEIGHT_DECAY = 1e-3, 0.1


def cut(model: nn.Module, blocks: int) -> bool:
    """Keep the first ``blocks`` repeated layers, in place.

    Returns whether the model still is a shorter one of the same kind: not if its layers differ, or
    if others look like the repeated ones now, which would be sharded instead.
    """
    whole = repeated_blocks(model)
    if blocks >= len(whole):
        return True
    holder = _list_of(model, whole)
    if holder is None or len(set(map(_shapes_of, whole))) != 1:
        return False
    removed = set(map(id, whole[blocks:]))
    for index in reversed(range(len(holder))):
        if id(holder[index]) in removed:
            del holder[index]
    return list(map(id, repeated_blocks(model))) == list(map(id, whole[:blocks]))


def _list_of(model: nn.Module, blocks: list[nn.Module]) -> nn.ModuleList | nn.Sequential | None:
    """Return the module list that holds all blocks."""
    wanted = set(map(id, blocks))
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and wanted <= set(map(id, module)):
            return module
    return None


def _shapes_of(block: nn.Module) -> tuple[object, ...]:
    shapes: list[object] = [type(block)]
    for name, weight in block.named_parameters():
        shapes.append((name, tuple(weight.shape), weight.dtype, weight.requires_grad))
    return tuple(shapes)


class WholeModel(NamedTuple):
    """The size of a model with all its repeated layers."""

    blocks: int
    parameters: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class BuiltStep:
    """A training run whose steps can be run one by one."""

    candidate: Candidate
    world: World
    model: nn.Module  # wrapped by the strategy
    optimizer: torch.optim.Optimizer
    update: TrainStep
    loss: losses.Loss
    precision: Precision
    blocks: tuple[nn.Module, ...]  # its repeated layers
    whole: WholeModel
    _sample: Callable[[], Any]  # one sample, to be collated

    def step(self, number: int = 0) -> Step:
        """Return a step with batches of the right shapes, created one by one as by a loader."""
        candidate = self.candidate
        return Step(
            epoch=0,
            number=number,
            rounds=candidate.accumulation,
            samples=candidate.global_batch_size,
            nominal_samples=candidate.global_batch_size,
            micro_batches=self._micro_batches(),
        )

    def _micro_batches(self) -> Iterator[MicroBatch]:
        size = self.candidate.micro_batch_size
        for _ in range(self.candidate.accumulation):
            yield MicroBatch(batch=self.batch(), samples=size)

    def batch(self) -> Any:
        """Return one micro-batch, on the device."""
        samples = [self._sample() for _ in range(self.candidate.micro_batch_size)]
        return move_to_device(default_collate(samples), self.world.device)

    def loss_of(self, batch: Any) -> tuple[torch.Tensor, int | torch.Tensor | None]:
        """Compute a micro-batch's loss as the trainer does."""
        with self.precision.autocast(self.world.device):
            result = self.loss(self.model, batch)
        return result if isinstance(result, tuple) else (result, None)

    def train(self, number: int = 0) -> StepResult:
        """Run one whole step."""
        for micro in self.update.accumulate(self.step(number)):
            loss, count = self.loss_of(micro.batch)
            self.update.backward(loss, count)
        return self.update.apply()


def build_step(
    work: Work, candidate: Candidate, world: World, *, blocks: int | None = None
) -> BuiltStep:
    """Build a training run; ``blocks`` limits the number of repeated layers.

    Weights are random, never read from files: no size depends on them.
    """
    with contextlib.chdir(work.folder):
        return _build(work, candidate, world, blocks)


def _build(work: Work, candidate: Candidate, world: World, blocks: int | None) -> BuiltStep:
    recipe = _recipe(work)
    with values_matter(world):
        model, whole = _model(work, recipe, candidate, world, blocks)
        sample = _sample_of(work, recipe, model)
    if candidate.recompute != "none":
        recompute_blocks(model, candidate.recompute)
    precision = PRECISIONS[candidate.precision]
    strategy = strategies.build_strategy(
        candidate.strategy, world, precision=precision, sharding=_sharding_of(candidate)
    )
    forget_values(model, world)
    four_bit.quantize_without_memory(model)
    repeated = tuple(repeated_blocks(model))
    prepared = strategy.prepare(model)
    prepared.train()
    with values_matter(world):  # bitsandbytes computes tables
        optimizer = _optimizer(work, prepared)
    loss = work.loss or recipe.usual_loss
    return BuiltStep(
        candidate=candidate,
        world=world,
        model=prepared,
        optimizer=optimizer,
        update=TrainStep(
            prepared, optimizer, strategy, world, precision=precision, clip_norm=work.clip_norm
        ),
        loss=losses.loss_named(loss) or factory.find_import(loss, "model.loss"),
        precision=precision,
        blocks=repeated,
        whole=whole,
        _sample=sample,
    )


def _optimizer(work: Work, model: nn.Module) -> torch.optim.Optimizer:
    groups = optimizers.parameter_groups(
        model,
        learning_rate=_LEARNING_RATE,
        weight_decay=_WEIGHT_DECAY,
    )
    options = work.optimizer_options or {}
    if ":" in work.optimizer:
        make = factory.find_import(work.optimizer, "train.optimizer")
        return cast(torch.optim.Optimizer, make(groups, **options))
    named = optimizers.optimizer_named(
        cast(optimizers.Name, work.optimizer),
        learning_rate=_LEARNING_RATE,
        weight_decay=_WEIGHT_DECAY,
        **options,
    )
    return named(groups)


def _sharding_of(candidate: Candidate) -> Sharding | None:
    if candidate.strategy != "fsdp":
        return None
    kind: Kind = "full_shard" if candidate.reshard else "shard_grad_op"
    if candidate.layout.copies > 1:
        kind = "hybrid_shard"
    return Sharding(kind=kind, cpu_offload=candidate.cpu_offload)


def _model(
    work: Work, recipe: ModelRecipe, candidate: Candidate, world: World, blocks: int | None
) -> tuple[nn.Module, WholeModel]:
    """Return a model without memory with ``blocks`` repeated layers, and the size of the whole."""
    compute = PRECISIONS[candidate.precision].compute if work.load_in_4bit else None

    def make() -> nn.Module:
        return _sketch(recipe, compute)

    model = sketch = build_on_meta(make)
    whole = _size_of(sketch)
    if world.backend != "fake":
        model = build_for(candidate.strategy, make, world, seed=0, sketch=sketch)
    elif blocks is not None and not cut(model, blocks):
        model = build_on_meta(make)
    if work.sequence_length is not None:
        check_tokens(
            getattr(model, "config", None), vocabulary=None, sequence_length=work.sequence_length
        )
    return model, whole


def _sketch(recipe: ModelRecipe, compute: torch.dtype | None) -> nn.Module:
    """Create a model with initial weights; ``compute`` is the dtype of its 4-bit layers, if any.

    LoRA is added after the layers are quantized, as peft's own depend on them.
    """
    if compute is None or recipe.lora is None:
        return recipe.sketch()
    model = replace(recipe, lora=None).sketch()
    four_bit.replace_linear_layers(model, compute, whole=recipe.lora.get("modules_to_save") or ())
    return lora.add_lora(model, **recipe.lora)


def _recipe(work: Work) -> ModelRecipe:
    files = None
    if work.model_name_or_path is not None:
        files = hugging_face.find_model(work.model_name_or_path)
    return ModelRecipe(
        files=files,
        build=work.build,
        dtype=work.torch_dtype or ("auto" if files is None else "float32"),
        lora=work.lora,
        labels=None if work.images is None else image_classes(work.images),
    )


def _size_of(model: nn.Module) -> WholeModel:
    parameters = trained = 0
    for weight in model.parameters():
        parameters += weight.numel()
        trained += weight.numel() * weight.requires_grad
    return WholeModel(len(repeated_blocks(model)), parameters, trained)


def _sample_of(work: Work, recipe: ModelRecipe, model: nn.Module) -> Callable[[], Any]:
    if work.dataset is not None:
        samples = factory.call_import(work.dataset, "data.dataset")
        first = samples[0] if hasattr(samples, "__getitem__") else next(iter(samples))
        return lambda: first
    if work.images is not None:
        assert recipe.files is not None, "images need a model with an image processor"
        assert recipe.labels is not None, "images have classes"
        processor = hugging_face.load_image_processor(recipe.files)
        image = ImageFolder(work.images, processor, recipe.labels)[0]
        return lambda: image
    assert work.sequence_length is not None, "a request without data has a length"
    length, vocabulary = work.sequence_length, _vocabulary(model)

    def row() -> dict[str, torch.Tensor]:
        tokens = torch.randint(vocabulary, (length,))
        made = {"input_ids": tokens, "labels": tokens}
        if work.packed:  # two documents, each starting at position 0
            half = length // 2
            made["position_ids"] = torch.cat([torch.arange(half), torch.arange(length - half)])
        return made

    return row


def _vocabulary(model: nn.Module) -> int:
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    if known is not None:
        return int(known)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    raise Impossible(
        "the model has no token embedding, so it cannot be planned with rows of text",
        why="a sequence length is set, but no dataset",
        fix="set data.dataset (module:function): the shape of its first sample is used",
    )
