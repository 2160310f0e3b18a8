"""Record a fingerprint of every optimizer step of an unchanged script.

A step begins with the first forward of a model in training and ends when the next step begins, so it includes what the
script does after ``optimizer.step()``: the schedule, an average of the weights, a save.
"""

import functools
import gc
import inspect
import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, RandomSampler

from torchmuster.integrations.libraries import record_script
from torchmuster.prove.probes import fingerprints
from torchmuster.prove.probes.stopping import Stopper
from torchmuster.prove.records import (
    EventKind,
    EventRecord,
    Line,
    MicroBatch,
    ParametersRecord,
    StepRecord,
    TrialRequest,
    file_of,
)
from torchmuster.runfolder import write_atomically

_LOOKS_FOR_COPIES_AFTER = (1, 2)  # steps: a script may create its average in the second one
_MOST_KEYS = 30
_STEPS_AFTER_A_SAVE = 6  # so that a resumed run has steps to compare
_WAITS_FOR_A_SAVE_S = 60.0
_NOT_SETTINGS = ("lr", "params", "initial_lr")
_DEPENDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ProofRecorder:
    """Records the steps of one rank, stops it where requested, and exits after the last step."""

    def __init__(self, request: TrialRequest) -> None:
        self._request = request
        self._rank = int(os.environ.get("RANK", "0"))
        self._file = file_of(Path(request.into), self._rank).open("ab", buffering=0)
        self._stopper = Stopper(request, self._rank)
        self._first_save = Path(request.into) / "first-save"
        self._begun_s = time.monotonic()
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._number = 0  # steps that are written
        self._open: StepRecord | None = None  # stepped, but not written yet
        self._batches: list[MicroBatch] = []
        self._begin: dict[str, Any] = {}  # fields known before the step
        self._gradients: dict[str, Any] = {}
        self._created: list[weakref.ref[torch.optim.Optimizer]] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parameters: list[torch.Tensor] = []
        self._sharded: list[bool] = []
        self._models: dict[int, tuple[nn.Module, nn.Module]] = {}  # outermost -> without DDP
        self._buffers_of: nn.Module | None = None
        self._inside = self._in_backward = self._evaluated = False
        self._copies: list[Any] = []
        self._scalers: list[torch.amp.GradScaler] = []
        self._loaders: dict[int, tuple[int, Any]] = {}
        self._iterations: dict[int, int] = {}
        self._place: tuple[int, int, int] | None = None
        self._keys: list[str] = []

    def install(self) -> None:
        """Install the hooks."""
        self._watch_modules()
        self._watch_backward()
        self._watch_clipping()
        self._watch_loaders()
        self._watch_checkpoints()
        self._watch_optimizers()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        if not self._request.dropout:
            switch_dropout_off()

    def end(self) -> None:
        """Write the last step, after the script has ended."""
        if self._is_mine():
            self._close()
            self._event("end")

    def _is_mine(self) -> bool:
        """Return whether this is the training thread: not another thread or a loader's worker."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def _write(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def _event(self, kind: EventKind, **fields: Any) -> None:
        steps = self._number + (self._open is not None)
        self._write(EventRecord(kind=kind, step=steps, line=self._script_line(), **fields))

    def _script_line(self) -> str:
        """Return the innermost line of the user's own files, as ``train.py:12``."""
        folder = self._request.folder + os.sep
        frame: Any = inspect.currentframe()
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(folder):
                return f"{name.removeprefix(folder)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # ---- forward and backward

    def _watch_modules(self) -> None:
        """Wrap ``Module.__call__``: the global hooks of modules do not get keyword arguments."""
        usual = nn.Module.__call__

        @functools.wraps(usual)
        def call(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_mine() or self._in_backward:
                return usual(module, *arguments, **named)
            if self._inside:
                if module is self._buffers_of:
                    self._record_buffers(module)
                return usual(module, *arguments, **named)
            self._inside = True
            try:
                self._before_forward(module, arguments, named)
                return usual(module, *arguments, **named)
            finally:
                self._inside = False
                self._buffers_of = None

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def _before_forward(
        self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if id(module) not in self._models:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                return
            self._models[id(module)] = (module, _without_ddp(module))
        inner = self._models[id(module)][1]
        if not (inner.training and torch.is_grad_enabled()):  # Lightning leaves DDP in eval mode
            self._evaluated = True
            return
        tensors = list(fingerprints.data_tensors((*arguments, named)))
        if not tensors:
            return  # a part of the model that gets the output of another part
        self._close()
        if self._batches and self._batches[-1].loss is not None and _has_no_gradients(inner):
            self._batches = []  # a forward whose gradients are discarded is not part of the step
        self._stopper.before_forward(self._number, len(self._batches))
        if self._number >= self._last_step() and not self._batches:
            self._finish()
        total = 0
        for _, tensor in tensors:
            total = fingerprints.tensor_hash(tensor, total)
        if not self._batches:
            self._begin = {"rng": fingerprints.random_states()}
            if inner is module:
                self._record_buffers(module)
            else:
                self._buffers_of = inner
        self._batches.append(
            MicroBatch(
                inputs=fingerprints.text_hash(total),
                samples=fingerprints.sample_hashes(tensors),
                place=self._place,
            )
        )

    def _last_step(self) -> int:
        """Return the step to exit after, the same one on all ranks.

        Rank 0 writes the step of its first save into a file. All ranks have read it some steps later.
        """
        request = self._request
        if request.most_steps <= request.steps or self._number < request.steps:
            return request.steps
        if time.monotonic() - self._begun_s > _WAITS_FOR_A_SAVE_S:
            self._end_soon()
        if not self._first_save.exists():
            return request.most_steps
        last = int(self._first_save.read_text()) + _STEPS_AFTER_A_SAVE
        return min(max(last, request.steps), request.most_steps)

    def _end_soon(self) -> None:
        if self._rank == 0 and not self._first_save.exists():
            write_atomically(self._first_save, str(self._number), durable=False)

    def _record_buffers(self, module: nn.Module) -> None:
        self._buffers_of = None
        self._begin["buffers"] = fingerprints.buffers_hash(module)

    def _watch_backward(self) -> None:
        usual = torch.autograd.backward

        @functools.wraps(usual)
        def backward(tensors: Any, *arguments: Any, **named: Any) -> None:
            if not self._is_mine():
                usual(tensors, *arguments, **named)
                return
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and self._batches:
                last = self._batches[-1]
                last.loss = _finite_or_large(float(tensors.detach()) + (last.loss or 0.0))
            self._in_backward = True
            try:
                usual(tensors, *arguments, **named)
            finally:
                self._in_backward = False

        torch.autograd.backward = backward  # Tensor.backward calls it by this name

    def _watch_clipping(self) -> None:
        usual = nn.utils.clip_grad_norm_

        @functools.wraps(usual)
        def clip(*arguments: Any, **named: Any) -> Any:
            norm = usual(*arguments, **named)
            if self._is_mine():
                whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                self._begin["unclipped_norm"] = _finite_or_large(float(whole))
            return norm

        nn.utils.clip_grad_norm_ = clip
        nn.utils.clip_grad.clip_grad_norm_ = clip

    # ---- the optimizer

    def _watch_optimizers(self) -> None:
        """Remember all optimizers, so that the first step knows the parameters of each of them."""
        usual = torch.optim.Optimizer.__init__

        @functools.wraps(usual)
        def create(optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> None:
            usual(optimizer, *arguments, **named)
            self._created.append(weakref.ref(optimizer))

        torch.optim.Optimizer.__init__ = create  # type: ignore[method-assign, assignment]

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Record the gradients now, or after the closure that computes them (Lightning)."""
        closures = [argument for argument in arguments[1:] if callable(argument)]
        closure = named.get("closure") or next(iter(closures), None)
        if closure is None:
            self._record_gradients(optimizer)
            return None

        def wrapped() -> Any:
            result = closure()
            self._record_gradients(optimizer)
            return result

        if "closure" in named:
            return arguments, {**named, "closure": wrapped}
        index = arguments.index(closure)
        return (*arguments[:index], wrapped, *arguments[index + 1 :]), named

    def _record_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_mine() or not (self._batches or self._open):
            return  # DCP creates the state of an optimizer by a step without a forward
        if not self._optimizers:
            self._know([made for ref in self._created if (made := ref()) is not None])
        if optimizer not in self._optimizers:
            self._know([optimizer])
        # Only before the first closure of LBFGS, which changes the weights itself.
        if self._number == 0 and self._open is None and "weights_before" not in self._gradients:
            self._gradients["weights_before"] = self._weights()
            self._gradients["state_before"] = fingerprints.optimizer_state(self._optimizers)
            self._find_scalers()
        total = 0
        whole: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for parameter, is_part in zip(self._parameters, self._sharded, strict=True):
            if parameter.grad is not None:
                total = fingerprints.tensor_hash(parameter.grad, total)
                if is_part:
                    parts.append(parameter.grad)
                else:
                    whole.append(parameter.grad)
        rates, settings = _optimizer_settings(optimizer)
        scales = [scaler.get_scale() for scaler in self._scalers if scaler.is_enabled()]
        self._gradients |= {
            "gradients": fingerprints.text_hash(total),
            "replicated_square": _finite_or_large(fingerprints.squared_norm(whole)),
            "sharded_square": _finite_or_large(fingerprints.squared_norm(parts)),
            "learning_rates": rates,
            "settings": settings,
            "scale": next(iter(scales), None),
        }

    def _know(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Add the parameters of optimizers, with their names."""
        self._optimizers += optimizers
        names: dict[int, str] = {}
        layers: set[str] = set()
        flat: set[int] = set()
        for outermost, inner in self._models.values():
            names |= {id(parameter): name for name, parameter in inner.named_parameters()}
            layers |= {
                type(part).__name__ for part in inner.modules() if isinstance(part, _DEPENDS)
            }
            flat |= _flattened(outermost)
        known = {id(parameter) for parameter in self._parameters}
        for parameter in _parameters_of(optimizers):
            if id(parameter) not in known:
                known.add(id(parameter))
                self._parameters.append(parameter)
                is_part = id(parameter) in flat or fingerprints.is_sharded(parameter)
                self._sharded.append(is_part)
        all_names = []
        for number, parameter in enumerate(self._parameters):
            all_names.append(names.get(id(parameter), f"parameter {number}"))
        self._write(
            ParametersRecord(
                names=all_names,
                sharded=self._sharded,
                dtype=str(self._parameters[0].dtype).removeprefix("torch."),
                layers=sorted(layers),
            )
        )

    def _find_scalers(self) -> None:
        scaler = torch.amp.GradScaler
        self._scalers = [thing for thing in gc.get_objects() if issubclass(type(thing), scaler)]

    def _weights(self) -> list[str]:
        return [
            fingerprints.text_hash(fingerprints.tensor_hash(parameter))
            for parameter in self._parameters
        ]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_mine() or not self._gradients:
            return
        if self._batches:
            self._open = StepRecord(
                step=self._number + 1,
                micro_batches=self._batches,
                **self._begin,
                **self._gradients,
            )
            self._batches, self._begin = [], {}
        elif self._open is not None:  # another optimizer of the same step
            more = self._gradients
            self._open.learning_rates += more["learning_rates"]
            self._open.settings += more["settings"]
            self._open.gradients = more["gradients"]
            self._open.replicated_square = more["replicated_square"]
            self._open.sharded_square = more["sharded_square"]
        self._gradients = {}
        self._stopper.stepped(self._number + 1)

    def _close(self) -> None:
        """Write the step that is over."""
        record, self._open = self._open, None
        if record is None:
            return
        self._number += 1
        if self._number in _LOOKS_FOR_COPIES_AFTER:
            self._copies = fingerprints.find_copies(self._model_parameters())
        record.weights = self._weights()
        record.weights_norm = _finite_or_large(fingerprints.squared_norm(self._parameters) ** 0.5)
        record.state = fingerprints.optimizer_state(self._optimizers)
        record.copies = [fingerprints.copy_hash(one) for one in self._copies]
        record.evaluated, self._evaluated = self._evaluated, False
        self._write(record)

    def _model_parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the model that has most of the trained ones."""
        trained = {id(parameter) for parameter in self._parameters}
        best: list[torch.Tensor] = []
        most = 0
        for _, inner in self._models.values():
            parameters: list[torch.Tensor] = list(inner.parameters())
            count = sum(id(parameter) in trained for parameter in parameters)
            if count > most:
                best, most = parameters, count
        return best

    def _finish(self) -> None:
        """Exit after the last requested step, once all ranks have made it."""
        self._event("end")
        sys.stdout.flush()
        sys.stderr.flush()
        self._stopper.wait_for_others("end")
        # Groups, threads and workers of an interrupted script may block Python's exit.
        os._exit(0)

    # ---- data

    def _watch_loaders(self) -> None:
        begin = DataLoader.__iter__
        watched: set[type] = set()

        @functools.wraps(begin)
        def iterate(loader: Any) -> Any:
            if not self._is_mine():
                return begin(loader)
            number = self._know_loader(loader)
            iteration = self._iterations[number] = self._iterations.get(number, -1) + 1
            if loader.num_workers:
                usual = loader.worker_init_fn
                if isinstance(usual, fingerprints.SeedsOfWorkers):
                    usual = usual.own
                loader.worker_init_fn = fingerprints.SeedsOfWorkers(
                    usual, self._request.into, number, iteration
                )
            iterator = begin(loader)
            positions[id(iterator)] = [number, iteration, -1]
            kind = next(base for base in type(iterator).__mro__ if "__next__" in vars(base))
            if watched.isdisjoint(type(iterator).__mro__):
                watched.add(kind)
                watch(kind)
            return iterator

        positions: dict[int, list[int]] = {}

        def watch(kind: Any) -> None:
            following = kind.__next__

            @functools.wraps(following)
            def counted(iterator: Any) -> Any:
                batch = following(iterator)
                if self._is_mine() and (place := positions.get(id(iterator))):
                    place[2] += 1
                    self._place = (place[0], place[1], place[2])
                return batch

            kind.__next__ = counted

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def _know_loader(self, loader: Any) -> int:
        if id(loader) not in self._loaders:
            number = len(self._loaders)
            self._loaders[id(loader)] = number, loader
            samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
            inner = getattr(loader.batch_sampler, "batch_sampler", None)  # Accelerate's shards
            samplers.append(getattr(inner, "sampler", None))
            shuffles = False
            for sampler in samplers:
                if isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False) is True:
                    shuffles = True
            self._event("loader", shuffles=shuffles, values={"loader": str(number)})
        return self._loaders[id(loader)][0]

    # ---- checkpoints

    def _watch_checkpoints(self) -> None:
        records = Path(self._request.into)
        recorder = record_script(self._rank, records, int(os.environ.get("WORLD_SIZE", "1")))
        usual = recorder.saved

        def saved(path: str, *, library: str, **named: Any) -> None:
            usual(path, library=library, **named)
            if os.getpid() == self._process:
                place = path if "://" in path else str(Path(path).absolute())
                self._event("save", path=place, library=library, keys=self._keys)
                self._end_soon()

        recorder.saved = saved  # type: ignore[method-assign]
        save, load = torch.save, torch.load

        @functools.wraps(save)
        def keyed(obj: Any, *arguments: Any, **named: Any) -> Any:
            self._keys = []
            if isinstance(obj, dict):
                self._keys = [str(key) for key in list(obj)[:_MOST_KEYS]]
            return save(obj, *arguments, **named)

        @functools.wraps(load)
        def loaded(f: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(f, str | os.PathLike) and os.getpid() == self._process:
                self._event("load", path=str(Path(f).absolute()))
            return load(f, *arguments, **named)

        torch.save, torch.load = keyed, loaded


def _without_ddp(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            inner: nn.Module = part.module
            return inner
    return module


def _flattened(module: nn.Module) -> set[int]:
    """Return the parameters of FSDP1, which are parts of flat tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    found: set[int] = set()
    for part in module.modules():
        if kind is not None and isinstance(part, kind):
            found |= {id(parameter) for parameter in part.parameters()}
    return found


def _parameters_of(optimizers: list[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def switch_dropout_off() -> None:
    """Make dropout return its input, so that ranks with other random numbers give equal results."""

    def keep(*arguments: torch.Tensor, **named: Any) -> Any:
        return arguments[0] if arguments else named["input"]

    functional = nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(functional, name, keep)
    attention: Any = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > 4:
            return attention(*arguments[:4], 0.0, *arguments[5:], **named)
        return attention(*arguments, **{**named, "dropout_p": 0.0})

    functional.scaled_dot_product_attention = without


def _optimizer_settings(optimizer: torch.optim.Optimizer) -> tuple[list[float], str]:
    """Return the learning rates of the groups, and all other numbers of them as text."""
    rates, settings = [], []
    for group in optimizer.param_groups:
        rates.append(float(group.get("lr", 0.0)))
        for name, value in group.items():
            if name not in _NOT_SETTINGS and isinstance(value, int | float | tuple | list):
                settings.append((name, value))
    return rates, json.dumps(settings, default=str)


def _has_no_gradients(model: nn.Module) -> bool:
    for parameter in model.parameters():
        if parameter.grad is not None and fingerprints.local_tensor(parameter.grad).any():
            return False
    return True


def _finite_or_large(number: float) -> float:
    return number if math.isfinite(number) else 1e308
