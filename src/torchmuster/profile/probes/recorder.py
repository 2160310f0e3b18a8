"""Records the time breakdown of training steps without changes to the script.

A step ends with ``optimizer.step``. The phases are recorded by hooks on the calls that every
training makes: the DataLoader's iterator, the outermost modules, backward, the optimizer,
torch.save, and value reads.
"""

import functools
import os
import platform
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.profile.facts import (
    WARM_UP_STEPS,
    Loader,
    ProfileRequest,
    RankFacts,
    Step,
)
from torchmuster.profile.probes.changes import AppliedChange
from torchmuster.profile.probes.phases import ForwardPhases, Phases, first_tensor
from torchmuster.profile.probes.trace import StepTrace
from torchmuster.train.arguments import micro_batch_size
from torchmuster.train.step_log import StepLog
from torchmuster.train.trainer import Trainer

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "reduce"),
    *("gather", "scatter", "barrier", "all_gather_object", "broadcast_object_list"),
    *("send", "recv"),
)
_READERS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")


class Finished(SystemExit):
    """Raised after the last requested step; the script exits here, as with ``sys.exit(0)``."""


class StepRecorder:
    """Records the steps of one rank."""

    def __init__(self, request: ProfileRequest) -> None:
        self._request = request
        self.rank = int(os.environ.get("RANK", "0"))
        self._phases = Phases()
        self._trace = StepTrace(request, self.rank)
        self._change = AppliedChange(request.change)
        self._forward = ForwardPhases(self._phases)
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._steps: list[Step] = []
        self._number = 0  # of steps that ended
        self._profiled = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._loader: Any = None
        self._trainer: Trainer | None = None
        self._samples: int | None = None
        self._bucket_bytes: int | None = None
        self._notes: list[str] = []
        self._parameters: list[torch.Tensor] = []

    def install(self) -> None:
        """Install the hooks."""
        from torch.distributed import checkpoint as dcp  # slow to import, so only if needed

        from torchmuster.train.checkpointing.checkpointer import Checkpointer

        self._change.install()
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        self._forward.find()
        self._watch_trainer()
        self._watch_loaders()
        self._wrap(torch.autograd, "backward", self._run_backward)  # Tensor.backward calls it
        self._wrap(torch, "save", self._run_save)
        self._wrap(Checkpointer, "save", self._run_save)
        self._wrap(dcp, "save", self._run_save)
        for name in _READERS:
            self._wrap(torch.Tensor, name, self._run_read)
        for name in _COLLECTIVES:
            self._wrap(dist, name, self._run_collective)
        self._wrap(DistributedDataParallel, "__init__", self._run_ddp)

    def _wrap(self, owner: Any, name: str, run: Callable[..., Any]) -> None:
        """Call ``run(usual, *arguments)`` instead of a function, on the training thread only."""
        usual = getattr(owner, name)

        @functools.wraps(usual)
        def wrapped(*positional: Any, **named: Any) -> Any:
            # Loader threads and worker processes are no part of the step.
            if threading.get_ident() != self._thread or os.getpid() != self._process:
                return usual(*positional, **named)
            return run(usual, *positional, **named)

        setattr(owner, name, wrapped)

    def _run_backward(self, usual: Callable[..., Any], *positional: Any, **named: Any) -> None:
        self._change.set_autocast(False)
        try:
            with self._phases.backward():
                usual(*positional, **named)
        finally:
            self._change.set_autocast(True)

    def _run_save(self, usual: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        if not self._change.is_to_save():
            return None
        with self._phases.inside("save"):
            return usual(*positional, **named)

    def _run_read(self, usual: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        if not self._phases.reads_count:
            return usual(*positional, **named)
        with self._phases.inside("reads"):
            return usual(*positional, **named)

    def _run_collective(self, usual: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        with self._phases.inside("communication"):
            return usual(*positional, **named)

    def _run_ddp(
        self, usual: Callable[..., Any], model: Any, *positional: Any, **named: Any
    ) -> None:
        usual(model, *positional, **named)
        self._bucket_bytes = int(model.bucket_bytes_cap)

    def _watch_trainer(self) -> None:
        """Record when a ``Trainer`` waits for data, and which loader it uses."""
        phases = self._phases

        def wait(usual: Callable[..., Any], log: StepLog) -> None:
            phases.begin_wait()
            usual(log)

        def work(usual: Callable[..., Any], log: StepLog) -> None:
            usual(log)
            phases.end_wait()

        def fit(usual: Callable[..., Any], trainer: Trainer, **named: Any) -> Any:
            self._trainer = trainer
            return usual(trainer, **named)

        self._wrap(StepLog, "wait", wait)
        self._wrap(StepLog, "work", work)
        self._wrap(Trainer, "fit", fit)

    def _watch_loaders(self) -> None:
        watched: set[type] = set()

        def begin(usual: Callable[..., Any], loader: Any) -> Any:
            self._loader = loader
            with self._phases.inside("data"):
                iterator = usual(loader)
            # Its class is private to torch, and only one of its base classes has the method.
            kind = next(base for base in type(iterator).__mro__ if "__next__" in vars(base))
            if kind not in watched:
                watched.add(kind)
                self._wrap(kind, "__next__", following)
            return iterator

        def following(usual: Callable[..., Any], iterator: Any) -> Any:
            with self._phases.inside("data"):
                batch = usual(iterator)
            tensor = first_tensor(batch)
            self._samples = None if tensor is None or not tensor.dim() else len(tensor)
            return batch

        self._wrap(DataLoader, "__iter__", begin)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._optimizer is None:
            self._optimizer = optimizer
            self._follow(optimizer)
        self._phases.enter("optimizer")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._phases.leave()
        if optimizer is not self._optimizer:
            return  # with several optimizers, the first one's steps count
        self._number += 1
        if self._number > WARM_UP_STEPS:
            self._steps.append(self._phases.end(self._number, profiled=self._profiled))
        self._trace.after(self._number)
        if self._number == WARM_UP_STEPS - 1:
            self._forward.settle()
        if self._number >= self._request.last_step:
            raise Finished(0)
        self._profiled = self._phases.marks = self._trace.before(self._number + 1)
        self._change.before_step()
        self._phases.begin()

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook every gradient: the last one of a backward marks when this rank is ready."""
        for group in optimizer.param_groups:
            self._parameters += [part for part in group["params"] if part.requires_grad]
        for parameter in self._parameters:
            try:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _: self._phases.gradient_ready()
                )
            except RuntimeError as error:
                self._notes.append(f"the time of the last gradient is unknown: {error}")
                return

    def facts(self) -> RankFacts:
        """Write the trace, and return the facts, after the script has ended."""
        self._phases.leave_all()
        parameters = self._parameters
        device = parameters[0].device if parameters else torch.device("cpu")
        dtypes: Counter[str] = Counter()
        for parameter in parameters:
            dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        lower = self._forward.lower_dtype
        gradients = [part.grad for part in parameters if part.grad is not None]
        return RankFacts(
            rank=self.rank,
            host=platform.node(),
            device=str(device),
            device_name=_device_name(device),
            cores=usable_cores().value,
            ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            threads=torch.get_num_threads(),
            steps=tuple(self._steps),
            loader=self._loader_facts(),
            parameter_dtypes=dict(dtypes),
            gradient_bytes=sum(gradient.nbytes for gradient in gradients),
            autocast=None if lower is None else str(lower).removeprefix("torch."),
            strategy=self._strategy(),
            bucket_bytes=self._bucket_bytes,
            trace=self._trace.write(),
            notes=tuple(self._notes),
            change_unused=not self._change.used,
        )

    def _strategy(self) -> Any:
        if self._bucket_bytes is not None:
            return "ddp"
        sharded = any(hasattr(part, "device_mesh") for part in self._parameters)
        return "fsdp" if sharded else None

    def _loader_facts(self) -> Loader | None:
        loader = self._loader
        if loader is not None:
            workers, samples = loader.num_workers, self._samples
        elif self._trainer is not None:
            loader = self._trainer.loader
            workers, samples = getattr(loader, "workers", 0), micro_batch_size(loader)
        else:
            return None
        dataset = type(getattr(loader, "dataset", loader)).__name__
        return Loader(workers=workers, samples_per_batch=samples, dataset=dataset)


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return str(torch.get_device_module(device).get_device_name(device))
