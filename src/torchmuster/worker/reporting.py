"""Reports of rank 0: rates in the step line, single lines, and the trackers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.config.here import check_sinks
from torchmuster.config.resolve import Resolved
from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError, Impossible
from torchmuster.model_flops import TransformerSize
from torchmuster.monitor.sinks import send_in_background
from torchmuster.plan.hardware import catalogue
from torchmuster.runfolder import RunFolder
from torchmuster.train.models.parameters import parameter_counts
from torchmuster.train.reports import print_line
from torchmuster.train.world import World, all_gather_object


def peak_flops(device: torch.device, model: nn.Module, compute: torch.dtype) -> float | None:
    """Return the device's peak rate in the dtype of computation; None if unknown."""
    if device.type != "cuda":
        return None
    known = catalogue.find_gpu(torch.cuda.get_device_name(device))
    if known is None:
        return None
    if compute is torch.float32:
        weights = {parameter.dtype for parameter in model.parameters()}
        if weights != {torch.float32} or torch.get_float32_matmul_precision() != "highest":
            return (
                None  # weights in 16 bits decide; TF32 has a rate that the catalogue does not have
            )
    return known.flops.get(str(compute).removeprefix("torch."))


def flops_of_batch(model: nn.Module) -> Callable[[Any], float] | None:
    """Return the FLOPs of training on a batch; None if the model is no plain language model.

    The formula of :mod:`torchmuster.model_flops` needs a transformers model of text whose tokens all
    pass through all parameters, so a mixture of experts has none.
    """
    config: Any = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    if layers is None or heads is None or config.is_encoder_decoder:
        return None
    if any("expert" in name for name, _ in model.named_parameters()):
        return None
    total, trained = parameter_counts(model)
    transformer: Any = model
    embedding = transformer.get_input_embeddings().weight
    output = transformer.get_output_embeddings()
    if output is None or output.weight is not embedding:  # it is only looked up
        total -= embedding.numel()
        trained -= embedding.numel() if embedding.requires_grad else 0
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    size = TransformerSize(
        trained=trained, frozen=total - trained, layers=layers, hidden=heads * head_size
    )

    def flops(batch: Any) -> float:
        rows, sequence_length = batch["input_ids"].shape
        return size.training_flops(rows=rows, sequence_length=sequence_length)

    return flops


def rank_zero_log(world: World, text: str) -> None:
    """Print a text, on rank 0."""
    if world.is_first:
        print_line(text)


def refuse_missing_sinks(resolved: Resolved, world: World) -> None:
    """Raise on all ranks, before training, if rank 0's host lacks a requirement of a sink."""
    if not resolved.settings.metrics.sinks:
        return
    problem = ""
    if world.is_first:
        try:
            check_sinks(resolved)
        except ConfigError as error:
            problem = error.why
    (problem, *_) = all_gather_object(problem, world)
    if problem:
        raise Impossible("rank 0 cannot send metrics to the configured sinks", why=problem)


@contextmanager
def start_sinks(settings: Settings, world: World, folder: Path) -> Iterator[None]:
    """Send the metrics of a run while it trains; report at its end what could not be sent."""
    trackers = settings.metrics.sinks
    if not world.is_first or not trackers:
        yield
        return
    with send_in_background(folder, trackers, settings.experiment_name) as missing:
        yield
    for tracker, error in missing.items():
        rank_zero_log(
            world,
            f"{tracker} is missing metrics ({error}); {RunFolder(folder).metrics} has all of them, "
            "and a resumed run sends the rest",
        )
