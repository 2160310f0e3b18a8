"""Record a fingerprint of every optimizer step of an unchanged script.

A step begins with the first forward of a model in training and ends when the next step begins, so it includes what the
script does after ``optimizer.step()``: the schedule, an average of the weights, a save.
"""

import gc
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchmuster.integrations.libraries import record_script
from torchmuster.prove.probes import fingerprints
from torchmuster.prove.probes.loaders import LoaderWatch
from torchmuster.prove.probes.replacing import replace
from torchmuster.prove.probes.stopping import Stopper
from torchmuster.prove.probes.trained import Trained, finite_or_large, optimizer_settings
from torchmuster.prove.probes.weight_copies import WeightCopies
from torchmuster.prove.records import (
    EventKind,
    EventRecord,
    Line,
    MicroBatch,
    StepRecord,
    TrialRequest,
    file_of,
)
from torchmuster.runfolder import write_atomically

_LOOKS_FOR_COPIES_AFTER = (1, 2)  # steps: a script may create its average in the second one
_MOST_KEYS = 30
_STEPS_AFTER_A_SAVE = 6  # so that a resumed run has steps to compare
_WAITS_FOR_A_SAVE_S = 60.0
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")


class ProofRecorder:
    """Records the steps of one rank, stops it where requested, and exits after the last step."""

    def __init__(self, request: TrialRequest) -> None:
        self._request = request
        self._rank = int(os.environ.get("RANK", "0"))
        self._file = file_of(Path(request.into), self._rank).open("ab", buffering=0)
        self._stopper = Stopper(request, self._rank)
        self._loaders = LoaderWatch(request.into, self._event)
        self._first_save = Path(request.into) / "first-save"
        self._begun_s = time.monotonic()
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._written = 0  # steps
        self._step: StepRecord | None = None  # from its first forward until the next step begins
        self._stepped = False  # an optimizer has made it
        self._trained = Trained()
        self._copies = WeightCopies()
        self._scalers: list[torch.amp.GradScaler] = []
        self._keys: list[str] = []  # of the checkpoint that is saved
        self._inside = self._in_backward = False
        self._buffers_of: nn.Module | None = None

    def install(self) -> None:
        """Install the hooks."""
        # The global hooks of modules do not get keyword arguments.
        self._replace(nn.Module, "__call__", self._forward)
        self._replace(torch.autograd, "backward", self._backward)  # Tensor.backward calls it
        self._replace(nn.utils, "clip_grad_norm_", self._clip)
        nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_
        self._replace(Optimizer, "__init__", self._create)
        self._loaders.install(self._is_mine)
        self._watch_saves()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        if not self._request.dropout:
            switch_dropout_off()

    def end(self) -> None:
        """Write the last step, after the script has ended."""
        if self._stepped and self._is_mine():
            self._close()

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        replace(owner, name, replacement, when=self._is_mine)

    def _is_mine(self) -> bool:
        """Return whether this is the training thread: not another thread, a loader's worker or the compiler."""
        return (
            not torch.compiler.is_compiling()
            and threading.get_ident() == self._thread
            and os.getpid() == self._process
        )

    def _write(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def _event(self, kind: EventKind, **fields: Any) -> None:
        steps = self._written + self._stepped
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

    def _forward(self, usual: Any, module: nn.Module, *arguments: Any, **named: Any) -> Any:
        if self._inside or self._in_backward:
            if module is self._buffers_of:
                self._record_buffers(module)
            return usual(module, *arguments, **named)
        self._inside = True
        try:
            self._before_forward(module, (*arguments, named))
            return usual(module, *arguments, **named)
        finally:
            self._inside = False
            self._buffers_of = None

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        inner = self._trained.model_in(module)
        if inner is None or not inner.training or not torch.is_grad_enabled():
            return  # Lightning leaves DDP in eval mode
        tensors = list(fingerprints.data_tensors(inputs))
        if not tensors:
            return  # a part of the model that gets the output of another part
        if self._stepped:
            self._close()
        step = self._step
        if step and step.micro_batches[-1].loss is not None and _has_no_gradients(inner):
            step = None  # a forward whose gradients are discarded is not part of the step
        self._stopper.before_forward(len(step.micro_batches) if step else 0)
        if step is None:
            if self._written >= self._last_step():
                self._exit()
            rng = fingerprints.random_states()
            step = self._step = StepRecord(step=self._written + 1, micro_batches=[], rng=rng)
            if inner is module:
                self._record_buffers(module)
            else:  # once DDP has broadcast them
                self._buffers_of = inner
        step.micro_batches.append(
            MicroBatch(
                inputs=fingerprints.tensors_hash(tensor for _, tensor in tensors),
                samples=fingerprints.sample_hashes(tensors),
                place=self._loaders.place,
            )
        )

    def _record_buffers(self, module: nn.Module) -> None:
        self._buffers_of = None
        if self._step is not None:
            self._step.buffers = fingerprints.tensors_hash(module.buffers())

    def _backward(self, usual: Any, tensors: Any, *arguments: Any, **named: Any) -> None:
        is_loss = isinstance(tensors, torch.Tensor) and tensors.numel() == 1
        if is_loss and self._step is not None and not self._stepped:
            last = self._step.micro_batches[-1]
            last.loss = finite_or_large(float(tensors.detach()) + (last.loss or 0.0))
        self._in_backward = True
        try:
            usual(tensors, *arguments, **named)
        finally:
            self._in_backward = False

    def _clip(self, usual: Any, *arguments: Any, **named: Any) -> Any:
        norm = usual(*arguments, **named)
        whole = norm
        if hasattr(norm, "full_tensor"):
            whole = norm.full_tensor()
        if self._step is not None and not self._stepped:
            self._step.unclipped_norm = finite_or_large(float(whole))
        return norm

    # ---- the last step

    def _last_step(self) -> int:
        """Return the step to exit after, the same one on all ranks.

        Rank 0 writes the step of its first save into a file. All ranks have read it some steps later.
        """
        request = self._request
        if request.most_steps <= request.steps or self._written < request.steps:
            return request.steps
        if time.monotonic() - self._begun_s > _WAITS_FOR_A_SAVE_S:
            self._end_soon()
        if not self._first_save.exists():
            return request.most_steps
        last = int(self._first_save.read_text()) + _STEPS_AFTER_A_SAVE
        return min(max(last, request.steps), request.most_steps)

    def _end_soon(self) -> None:
        if self._rank == 0 and not self._first_save.exists():
            write_atomically(self._first_save, str(self._written), durable=False)

    def _exit(self) -> None:
        """Exit after the last requested step, once all ranks have made it."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._stopper.wait_for_others("end")
        # Groups, threads and workers of an interrupted script may block Python's exit.
        os._exit(0)

    # ---- the optimizer

    def _create(self, usual: Any, optimizer: Optimizer, *arguments: Any, **named: Any) -> None:
        usual(optimizer, *arguments, **named)
        self._trained.remember(optimizer)

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Record the gradients now, or after the closure that computes them (Lightning)."""
        _, *positional = arguments
        closure = named.get("closure", next(iter(positional), None))
        if closure is None:
            self._record_gradients(optimizer)
            return None

        def wrapped() -> Any:
            result = closure()
            self._record_gradients(optimizer)
            return result

        return (optimizer,), {**named, "closure": wrapped}

    def _record_gradients(self, optimizer: Optimizer) -> None:
        step = self._step
        if step is None or not self._is_mine():
            return  # DCP creates the state of an optimizer by a step without a forward
        parameters = self._trained.add(optimizer)
        if parameters is not None:
            self._write(parameters)
            self._scalers = _grad_scalers()
        # Only before the first closure of LBFGS, which changes the weights itself.
        if self._written == 0 and step.weights_before is None:
            step.weights_before = self._trained.weights()
            step.state_before = self._trained.state()
        self._trained.record_gradients(step)
        scales = [scaler.get_scale() for scaler in self._scalers if scaler.is_enabled()]
        step.scale = next(iter(scales), None)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Add the settings of this optimizer; another one may follow in the same step."""
        if self._step is None or not self._is_mine():
            return
        rates, settings = optimizer_settings(optimizer)
        self._step.learning_rates += rates
        self._step.settings += settings
        self._stepped = True
        self._stopper.steps_done = self._written + 1

    def _close(self) -> None:
        """Write the step that is over."""
        record, self._step, self._stepped = self._step, None, False
        assert record is not None
        self._written += 1
        record.weights = self._trained.weights()
        record.weights_norm = self._trained.weights_norm()
        record.state = self._trained.state()
        search = self._written in _LOOKS_FOR_COPIES_AFTER
        record.copies = self._copies.hashes(self._trained.model_parameters(), search=search)
        self._write(record)

    # ---- checkpoints

    def _watch_saves(self) -> None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        recorder = record_script(self._rank, Path(self._request.into), world_size)

        def saved(usual: Any, path: str, *, library: str, **named: Any) -> None:
            usual(path, library=library, **named)
            if os.getpid() == self._process:
                if "://" not in path:
                    path = str(Path(path).absolute())
                self._event("save", path=path, library=library, keys=self._keys)
                self._end_soon()

        def save(usual: Any, obj: Any, *arguments: Any, **named: Any) -> Any:
            self._keys = []
            if isinstance(obj, dict):
                self._keys = [str(key) for key in list(obj)[:_MOST_KEYS]]
            return usual(obj, *arguments, **named)

        replace(recorder, "saved", saved)
        replace(torch, "save", save)


def _grad_scalers() -> list[torch.amp.GradScaler]:
    scaler = torch.amp.GradScaler
    return [thing for thing in gc.get_objects() if issubclass(type(thing), scaler)]


def _has_no_gradients(model: nn.Module) -> bool:
    """Return whether gradients were discarded; those of a micro-batch without any label are zeros."""
    return all(parameter.grad is None for parameter in model.parameters())


def switch_dropout_off() -> None:
    """Make dropout return its input, so that ranks with other random numbers give equal results."""

    def keep(_: Any, *arguments: torch.Tensor, **named: Any) -> Any:
        return arguments[0] if arguments else named["input"]

    def attention(usual: Any, *arguments: Any, **named: Any) -> Any:
        if len(arguments) > 4:  # query, key, value, mask, dropout
            return usual(*arguments[:4], 0.0, *arguments[5:], **named)
        return usual(*arguments, **{**named, "dropout_p": 0.0})

    for name in _DROPOUTS:
        replace(nn.functional, name, keep)
    replace(nn.functional, "scaled_dot_product_attention", attention)
