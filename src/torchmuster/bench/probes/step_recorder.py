"""Records the time breakdown of training steps without changes to the script.

A step ends with ``optimizer.step``. The phases are recorded by hooks on the calls that every
training makes: the DataLoader's iterator, the outermost modules, backward, the optimizer,
torch.save, and value reads.
"""

import functools
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from torchmuster.bench.probes.counted_flops import CountedFlops, is_compiled
from torchmuster.bench.probes.phases import ForwardPhases, Phases, first_tensor
from torchmuster.bench.probes.trace_file import TraceFile
from torchmuster.bench.probes.tried_changes import TriedChanges
from torchmuster.bench.profile.recording import (
    WARM_UP_STEPS,
    ProfileRequest,
    RankFacts,
    RecordedLoader,
    RecordedStep,
)
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.train.defaults import micro_batch_size
from torchmuster.train.metrics.step_metrics import StepMetrics
from torchmuster.train.trainer import Trainer


class OwnTrainer:
    """Records when a ``Trainer`` waits, and which loader it uses."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._trainer: Trainer | None = None

    def watch(self) -> None:
        """Install the hooks on the trainer."""
        phases, wait, work, fit = self._phases, StepMetrics.wait, StepMetrics.work, Trainer.fit

        @functools.wraps(wait)
        def watched_wait(tally: StepMetrics) -> None:
            phases.begin_wait()
            wait(tally)

        @functools.wraps(work)
        def watched_work(tally: StepMetrics) -> None:
            work(tally)
            phases.end_wait()

        @functools.wraps(fit)
        def watched_fit(trainer: Trainer, **named: Any) -> Any:
            self._trainer = trainer
            return fit(trainer, **named)

        StepMetrics.wait = watched_wait  # type: ignore[method-assign, assignment]
        StepMetrics.work = watched_work  # type: ignore[method-assign, assignment]
        Trainer.fit = watched_fit  # type: ignore[method-assign, assignment]

    def loader(self) -> RecordedLoader | None:
        """Return the trainer's loader; None if no ``Trainer`` has run."""
        if self._trainer is None:
            return None
        loader = self._trainer.loader
        size = micro_batch_size(loader)
        return RecordedLoader(
            workers=getattr(loader, "workers", 0),
            batch_size=size,
            samples_per_batch=size,
            pin_memory=False,
            prefetch_factor=None,
            dataset=type(getattr(loader, "dataset", loader)).__name__,
        )


_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "send",
    "recv",
)
_READERS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")


class Finished(SystemExit):
    """Raised after the last requested step; the script exits here, as with ``sys.exit(0)``."""


class StepRecorder:
    """Records the steps of one rank."""

    def __init__(self, asked: ProfileRequest) -> None:
        self._asked = asked
        self.rank = int(os.environ.get("RANK", "0"))
        self._phases = Phases()
        self._trace = TraceFile(asked, self.rank)
        self._changes = TriedChanges(asked.changes)
        self._forward = ForwardPhases(self._phases)
        self._own_trainer = OwnTrainer(self._phases)
        self._flops = CountedFlops()
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._steps: list[RecordedStep] = []
        self._number = 0  # the current step is one more
        self._profiled = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._backward_ran = False  # since the last step
        self._making_states = False
        self._loader: Any = None
        self._samples: int | None = None
        self._bucket_bytes: int | None = None
        self._trouble: list[str] = []
        self._parameters: list[torch.Tensor] = []

    def install(self) -> None:
        """Install the hooks."""
        self._changes.install()
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        self._forward.find()
        self._own_trainer.watch()
        self._watch_loaders()
        self._watch_backward()
        self._watch_saves()
        for name in _READERS:
            setattr(torch.Tensor, name, self._watched_reader(getattr(torch.Tensor, name)))
        for name in _COLLECTIVES:
            setattr(dist, name, self._watched_collective(name, getattr(dist, name)))
        self._watch_ddp()

    def _is_mine(self) -> bool:
        """Return whether this is the training thread: not a loader thread or worker process."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def _inside(self, phase: str, function: Callable[..., Any], *words: Any, **named: Any) -> Any:
        if not self._is_mine():
            return function(*words, **named)
        depth = self._phases.depth
        self._phases.enter(phase)
        try:
            return function(*words, **named)
        finally:
            self._phases.left_of(depth)

    # The optimizer: steps start and end here.

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_mine():
            return
        # torch.distributed.checkpoint creates the states by a step with learning rate 0, before the
        # training.
        self._making_states = not self._backward_ran and _learns_nothing(optimizer)
        if self._making_states:
            return
        if self._optimizer is None:
            self._optimizer = optimizer
            self._follow(optimizer)
        self._phases.enter("optimizer")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_mine() or self._making_states:
            return
        self._phases.leave()
        if optimizer is not self._optimizer:
            return  # with several optimizers, the first one's steps count
        self._backward_ran = False
        self._number += 1
        if self._number > WARM_UP_STEPS:
            step = self._phases.end(
                self._number, profiled=self._profiled, memory_bytes=_memory_bytes()
            )
            self._steps.append(step)
        self._trace.after(self._number)
        if self._number == WARM_UP_STEPS - 1:
            self._forward.settle()
            self._count_next_step()
        elif self._number == WARM_UP_STEPS:
            self._flops.end()
        if self._number >= self._asked.last_step:
            raise Finished(0)
        self._profiled = self._phases.marks = self._trace.before(self._number + 1)
        self._changes.before_step(self._number + 1)
        self._phases.begin()

    def _count_next_step(self) -> None:
        if any(is_compiled(module) for module in self._forward.outermost):
            self._trouble.append("the model is compiled: FLOPs unknown")
            return
        self._flops.begin()

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook every gradient: the last one of a backward marks when this rank is ready."""
        self._parameters = [
            one for group in optimizer.param_groups for one in group["params"] if one.requires_grad
        ]
        for parameter in self._parameters:
            try:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _: self._phases.gradient_ready()
                )
            except RuntimeError as error:
                self._trouble.append(f"the time of the last gradient is unknown: {error}")
                return

    # Data.

    def _watch_loaders(self) -> None:
        begin = DataLoader.__iter__
        watched: set[type] = set()

        @functools.wraps(begin)
        def watched_begin(loader: Any) -> Any:
            if self._is_mine():
                self._loader = loader
            iterator = self._inside("data", begin, loader)
            # Its class is private to torch, and only one of its base classes has the method.
            kind = next(one for one in type(iterator).__mro__ if "__next__" in vars(one))
            if kind not in watched:
                watched.add(kind)
                self._watch_next(kind)
            return iterator

        DataLoader.__iter__ = watched_begin  # type: ignore[method-assign]

    def _watch_next(self, kind: Any) -> None:
        following = kind.__next__

        @functools.wraps(following)
        def watched_following(iterator: Any) -> Any:
            batch = self._inside("data", following, iterator)
            if self._is_mine():
                tensor = first_tensor(batch)
                self._samples = None if tensor is None or not tensor.dim() else len(tensor)
            return batch

        kind.__next__ = watched_following

    # Backward.

    def _watch_backward(self) -> None:
        usual = torch.autograd.backward

        @functools.wraps(usual)
        def watched(*words: Any, **named: Any) -> None:
            if not self._is_mine():
                usual(*words, **named)
                return
            self._changes.set_autocast(False)
            self._phases.gradient_ready_at_s = None
            try:
                self._inside("backward", usual, *words, **named)
            finally:
                self._changes.set_autocast(True)
            self._phases.backward_ended()
            self._backward_ran = True

        torch.autograd.backward = watched  # Tensor.backward calls it by this name

    # Saves.

    def _watch_saves(self) -> None:
        import torch.distributed.checkpoint as dcp  # slow to import, so only if needed
        from torch.distributed.checkpoint import state_dict_saver

        from torchmuster.train.checkpointing.checkpointer import Checkpointer

        torch.save = self._watched_save(torch.save)
        for module in (dcp, state_dict_saver):
            for name in ("save", "async_save"):
                setattr(module, name, self._watched_save(getattr(module, name)))
        Checkpointer.save = self._watched_save(Checkpointer.save)  # type: ignore[method-assign]

    def _watched_save(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(usual)
        def watched(*words: Any, **named: Any) -> Any:
            if not self._is_mine() or self._changes.is_to_save():
                return self._inside("save", usual, *words, **named)
            return None

        return watched

    # Value reads.

    def _watched_reader(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        phases, changes = self._phases, self._changes
        name = usual.__name__

        @functools.wraps(usual)
        def watched(tensor: torch.Tensor, *words: Any, **named: Any) -> Any:
            if not self._is_mine() or not phases.reading_shows:
                return usual(tensor, *words, **named)
            begun_s = time.perf_counter()
            try:
                with phases.marked("read"):
                    return changes.read(
                        (name, tensor.shape), lambda: usual(tensor, *words, **named)
                    )
            finally:
                phases.read(time.perf_counter() - begun_s)

        return watched

    # Other ranks.

    def _watched_collective(self, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(usual)
        def watched(*words: Any, **named: Any) -> Any:
            begun_at_s = time.monotonic()
            result = self._inside("communication", usual, *words, **named)
            if self._is_mine():
                tensor = first_tensor(list(words))
                size_bytes = None if tensor is None else tensor.nbytes
                self._phases.called(name, begun_at_s, size_bytes)
            return result

        return watched

    def _watch_ddp(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        usual = DistributedDataParallel.__init__

        @functools.wraps(usual)
        def watched(model: Any, *words: Any, **named: Any) -> None:
            usual(model, *words, **named)
            self._bucket_bytes = int(model.bucket_bytes_cap)

        DistributedDataParallel.__init__ = watched  # type: ignore[method-assign, assignment]

    # The end.

    def facts(self) -> RankFacts:
        """Write the trace, and return the facts, after the script has ended."""
        self._phases.left_of(0)
        self._flops.end()
        device = self._device()
        parameters = self._parameters
        types: Counter[str] = Counter()
        for one in parameters:
            types[str(one.dtype).removeprefix("torch.")] += one.numel()
        optimizer = self._optimizer
        return RankFacts(
            rank=self.rank,
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
            host=platform.node(),
            device=str(device),
            device_name=_name_of(device),
            cores=usable_cores().value,
            ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            threads=torch.get_num_threads(),
            interop_threads=torch.get_num_interop_threads(),
            epoch_minus_monotonic_s=time.time() - time.monotonic(),
            steps=tuple(self._steps),
            loader=self._loader_facts(),
            parameters=sum(types.values()),
            parameter_bytes=sum(one.nbytes for one in parameters),
            parameter_dtypes=dict(types),
            gradient_bytes=sum(one.grad.nbytes for one in parameters if one.grad is not None),
            autocast=self._flops.lower_type,
            spread=self._spread(),
            bucket_bytes=self._bucket_bytes,
            optimizer="" if optimizer is None else type(optimizer).__name__,
            flops_per_step=self._flops.flops,
            trace=self._trace.write(self._number),
            changes=self._asked.changes,
            trouble=(*self._trouble, *self._changes.unused),
        )

    def _device(self) -> torch.device:
        return self._parameters[0].device if self._parameters else torch.device("cpu")

    def _spread(self) -> Any:
        if self._bucket_bytes is not None:
            return "ddp"
        return "fsdp" if any(hasattr(one, "device_mesh") for one in self._parameters) else None

    def _loader_facts(self) -> RecordedLoader | None:
        loader = self._loader
        if loader is None:
            return self._own_trainer.loader()
        return RecordedLoader(
            workers=loader.num_workers,
            batch_size=loader.batch_size,
            samples_per_batch=self._samples,
            pin_memory=bool(loader.pin_memory),
            prefetch_factor=loader.prefetch_factor,
            dataset=type(loader.dataset).__name__,
        )


def _learns_nothing(optimizer: torch.optim.Optimizer) -> bool:
    # Not with Tensor.item and similar: these are hooked.
    rates = (group["lr"] for group in optimizer.param_groups if "lr" in group)
    return not any(torch.is_nonzero(torch.as_tensor(rate)) for rate in rates)


def _memory_bytes() -> int | None:
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return str(torch.get_device_module(device).get_device_name(device))
