"""Track the position in a step (phase, micro-batch and block) with hooks on the model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from torchmuster.plan.probes.build_step import BuiltStep
from torchmuster.plan.record import PhaseName, TracedCollective
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.models.blocks import repeated_blocks
from torchmuster.train.weights import own_name


class Stage(NamedTuple):
    """A part of a step."""

    phase: PhaseName = "forward"
    micro_batch: int = 0
    block: int | None = None
    after_block: int | None = None


class Stages:
    """Track the current stage of a training step, and notify a listener when it changes."""

    def __init__(self, changed: Callable[[Stage], None]) -> None:
        self.now = Stage()
        self.module = ""  # the innermost one that computes
        self._changed = changed
        self._around: list[str] = []

    def begin(self, phase: PhaseName, micro_batch: int = 0) -> None:
        """Record the start of a phase."""
        self._around.clear()
        self.module = ""
        self._go(Stage(phase=phase, micro_batch=micro_batch))

    def _go(self, stage: Stage) -> None:
        if stage != self.now:
            self.now = stage
            self._changed(stage)

    def _enter(self, block: int, phase: PhaseName) -> None:
        if self.now.phase == phase:
            self._go(self.now._replace(block=block, after_block=None))

    def _leave(self, block: int, phase: PhaseName) -> None:
        if self.now.phase == phase and self.now.block == block:
            self._go(self.now._replace(block=None, after_block=block))

    @contextmanager
    def followed(self, built: BuiltStep) -> Iterator[None]:
        """Track the training steps inside the ``with``."""
        names = {id(one): own_name(name) for name, one in built.model.named_modules()}

        def inward(module: nn.Module, args: Any) -> None:
            self._around.append(self.module)
            self.module = names.get(id(module), self.module)

        def outward(module: nn.Module, args: Any, output: Any) -> None:
            if self._around:
                self.module = self._around.pop()

        def computed(module: nn.Module, args: Any, output: Any) -> None:
            self._go(Stage(phase="loss", micro_batch=self.now.micro_batch))

        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(inward).remove)
            stack.callback(hooks.register_module_forward_hook(outward, always_call=True).remove)
            stack.callback(built.model.register_forward_hook(computed).remove)
            for number, block in enumerate(repeated_blocks(built.model)):
                self._follow_block(number, block, stack)
            updating = built.optimizer.register_step_pre_hook(lambda *_: self.begin("update"))
            stack.callback(updating.remove)
            yield

    def _follow_block(self, number: int, block: nn.Module, stack: ExitStack) -> None:
        """Track a block's forward, and its backward from output gradients to input gradients.

        The hooks are outside FSDP's, so that its gathers and reductions count to the block.
        """

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._enter(number, "forward")
            for one in _differentiated((args, kwargs)):
                one.register_hook(lambda _: self._leave(number, "backward"))  # type: ignore[no-untyped-call]

        def result(module: nn.Module, args: Any, output: Any) -> None:
            for one in _differentiated(output):
                one.register_hook(lambda _: self._enter(number, "backward"))  # type: ignore[no-untyped-call]

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._leave(number, "forward")

        stack.callback(
            block.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove
        )
        stack.callback(block.register_forward_hook(result, prepend=True).remove)
        stack.callback(block.register_forward_hook(after).remove)

    def of_step(self, step: Step) -> Step:
        """Return the step, whose micro-batches report the start of their forward."""

        def told() -> Iterator[MicroBatch]:
            micro_batches = iter(step)
            for number in range(step.rounds):
                self.begin("forward", number)
                yield next(micro_batches)

        return replace(step, micro_batches=told())


def _differentiated(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if tree.requires_grad:
            yield tree
    elif isinstance(tree, dict):
        for one in tree.values():
            yield from _differentiated(one)
    elif isinstance(tree, tuple | list):
        for one in tree:
            yield from _differentiated(one)


class Sized(NamedTuple):
    """A storage changes its size: allocated, freed, or resized."""

    number: int
    size_bytes: int
    operation: str
    module: str


class Done(NamedTuple):
    """An operation that was run."""

    name: str
    dtype: str
    flops: int
    moved_bytes: int
    made_bytes: int
    recomputed: bool


Event = Sized | Done | TracedCollective | Stage


@dataclass(slots=True)
class Storage:
    """The properties of a storage."""

    made_in: Stage
    stream: Literal["compute", "gather", "reduce"] = "compute"
    collective: bool = False  # used by a collective
    recomputed: bool = False  # created while a forward was recomputed


@dataclass(slots=True)
class AllocationLog:
    """The events, in order."""

    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)  # by number
