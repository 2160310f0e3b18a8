"""Track the position in a step (phase, micro-batch and block) with hooks on the model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from torchmuster.plan.probes.build_step import BuiltStep
from torchmuster.plan.record import PhaseName
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.models.blocks import repeated_blocks
from torchmuster.train.models.parameters import own_name


class Stage(NamedTuple):
    """A part of a step."""

    phase: PhaseName = "forward"
    micro_batch: int = 0
    block: int | None = None
    after_block: int | None = None


class Stages:
    """The current stage of a training step; ``changing`` is called before and after a change."""

    def __init__(self, changing: Callable[[], None]) -> None:
        self.now = Stage()
        self.module = ""  # the innermost one that computes
        self._changing = changing
        self._outer_modules: list[str] = []

    def begin(self, phase: PhaseName, micro_batch: int = 0) -> None:
        """Record the start of a phase."""
        self._outer_modules.clear()
        self.module = ""
        self._go(Stage(phase=phase, micro_batch=micro_batch))

    def _go(self, stage: Stage) -> None:
        if stage != self.now:
            self._changing()
            self.now = stage
            self._changing()

    def _enter(self, block: int, phase: PhaseName) -> None:
        if self.now.phase == phase:
            self._go(self.now._replace(block=block, after_block=None))

    def _leave(self, block: int, phase: PhaseName) -> None:
        if self.now.phase == phase and self.now.block == block:
            self._go(self.now._replace(block=None, after_block=block))

    @contextmanager
    def followed(self, built: BuiltStep) -> Iterator[None]:
        """Track the training steps inside the ``with``."""
        names = {id(module): own_name(name) for name, module in built.model.named_modules()}

        def entered(module: nn.Module, args: Any) -> None:
            self._outer_modules.append(self.module)
            self.module = names.get(id(module), self.module)

        def left(module: nn.Module, args: Any, output: Any) -> None:
            if self._outer_modules:
                self.module = self._outer_modules.pop()

        def computed(module: nn.Module, args: Any, output: Any) -> None:
            self._go(Stage(phase="loss", micro_batch=self.now.micro_batch))

        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(entered).remove)
            stack.callback(hooks.register_module_forward_hook(left, always_call=True).remove)
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
            for tensor in _differentiated((args, kwargs)):
                tensor.register_hook(lambda _: self._leave(number, "backward"))  # type: ignore[no-untyped-call]

        def result(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in _differentiated(output):
                tensor.register_hook(lambda _: self._enter(number, "backward"))  # type: ignore[no-untyped-call]

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._leave(number, "forward")

        before_hook = block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        stack.callback(before_hook.remove)
        stack.callback(block.register_forward_hook(result, prepend=True).remove)
        stack.callback(block.register_forward_hook(after).remove)

    def of_step(self, step: Step) -> Step:
        """Return the step, whose micro-batches report the start of their forward."""

        def reported() -> Iterator[MicroBatch]:
            micro_batches = iter(step)
            for number in range(step.rounds):
                self.begin("forward", number)
                yield next(micro_batches)

        return replace(step, micro_batches=reported())


def _differentiated(tree: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_of(tree):
        if tensor.requires_grad:
            yield tensor


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries, such as a model's output."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_of(value)
