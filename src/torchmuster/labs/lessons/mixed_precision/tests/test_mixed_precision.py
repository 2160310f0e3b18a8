"""The tests of the lab mixed-precision: pytest tests/, or muster lab check."""

from typing import Any

import torch
from torch import nn

from torchmuster.labs.testing import (
    Mistake,
    Submission,
    compare,
    exercise,
    forward_hooks,
    require,
    watched,
)


class _Witness(torch.autograd.Function):
    """An identity that records whether autocast was on in forward and backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, autocast: dict[str, bool]) -> torch.Tensor:
        context.autocast = autocast
        autocast["forward"] = torch.is_autocast_enabled("cpu")
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.autocast["backward"] = torch.is_autocast_enabled("cpu")
        return gradient, None


class _Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.autocast: dict[str, bool] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Witness.apply(self.layer(inputs), self.autocast)
        return result


@exercise
def test_train_step(submission: Submission) -> None:
    """Autocast around forward only, weights in 32 bits, decreasing loss."""
    model = _Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(16, 4)
    targets = inputs.sum(1, keepdim=True)
    losses = []
    for _ in range(3):
        losses.append(submission.code.train_step(model, inputs, targets, nn.MSELoss(), optimizer))
    dtypes = {parameter.dtype for parameter in model.parameters()}
    require(dtypes == {torch.float32}, "model-halved", f"the weights are {dtypes}")
    require(
        model.autocast["forward"], "no-autocast", "torch.is_autocast_enabled() is False in forward"
    )
    require(not model.autocast["backward"], "backward-in-autocast", "autocast is on in backward")
    good = isinstance(losses[0], float) and losses[2] < losses[0]
    require(good, "wrong-value", f"the losses of three steps are {losses}")


class _Scaler(torch.amp.GradScaler):
    """A scaler that records its calls."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__("cpu", init_scale=1024.0)
        self._calls = calls

    def scale(self, outputs: Any) -> Any:
        self._calls.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._calls.append("unscale")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        self._calls.append("step")
        return super().step(optimizer, *arguments, **named)

    def update(self, new_scale: Any = None) -> None:
        self._calls.append("update")
        super().update(new_scale)


@exercise
def test_scaled_step(submission: Submission) -> None:
    """Scale, unscale, clip, step, update, in this order; the step equals that in 32 bits."""
    calls: list[str] = []
    model = nn.Linear(4, 1)
    expected = _clipped_step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = _Scaler(calls)
    trouble = ""
    try:
        with (
            watched(nn.utils, "clip_grad_norm_", before=lambda *_, **__: calls.append("clip")),
            watched(optimizer, "step", before=lambda *_, **__: calls.append("optimizer.step")),
        ):
            submission.code.scaled_step(_loss(model), model, optimizer, scaler, 0.5)
    except NotImplementedError:
        raise
    except (AssertionError, RuntimeError) as error:  # a scaler used in the wrong order
        trouble = f"{type(error).__name__}: {error}".partition("\n")[0]
    order = f"called: {', '.join(calls)}" + (f"; then {trouble}" if trouble else "")
    require("scale" in calls, "loss-not-scaled", order)
    require("clip" in calls, "not-clipped", order)
    unscaled = "unscale" in calls and calls.index("unscale") < calls.index("clip")
    require(unscaled, "clip-before-unscale", order)
    require("step" in calls, "step-without-scaler", order)
    require("update" in calls, "no-scaler-update", order)
    if trouble:
        raise Mistake("raised", trouble)
    compare(model.weight, expected, "the weights after the step")


def _loss(model: nn.Module) -> torch.Tensor:
    inputs = torch.arange(8.0).reshape(2, 4)
    loss: torch.Tensor = model(inputs).pow(2).mean()
    return loss


def _clipped_step(model: nn.Linear) -> torch.Tensor:
    gradients = torch.autograd.grad(_loss(model), [model.weight, model.bias])
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    return model.weight.detach() - 0.1 * gradients[0] * torch.clamp(0.5 / norm, max=1.0)


class _Unstable(nn.Module):
    """A layer whose gradient overflows in float16 if it is scaled by more than about 4,000."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.dtypes: set[torch.dtype] = set()
        self.scales: list[float] = []  # before each step
        self._scaler = scaler

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs)
        self.dtypes.add(result.dtype)
        self.scales.append(self._scaler.get_scale())
        return result * 16


@exercise
def test_train_in_fp16(submission: Submission) -> None:
    """The first steps overflow, are skipped, and lower the scale; then it trains."""
    torch.manual_seed(6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    model = _Unstable(scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(12, 8, 4)
    batches = [(batch, batch.sum(1, keepdim=True)) for batch in inputs]
    criterion = nn.MSELoss()
    first = float(criterion(model(inputs[0]), batches[0][1]))
    model.dtypes.clear()
    model.scales.clear()
    skipped = submission.code.train_in_fp16(model, batches, criterion, optimizer, scaler)
    weights = model.layer.weight
    require(model.dtypes == {torch.float16}, "not-in-fp16", f"forward ran in {model.dtypes}")
    require(
        bool(torch.isfinite(weights).all()), "weights-not-finite", f"weights: {weights.tolist()}"
    )
    scales = [*model.scales, scaler.get_scale()]
    lowered = [step for step in range(len(batches)) if scales[step + 1] < scales[step]]
    require(bool(lowered), "overflow-unnoticed", f"the scale is still {scaler.get_scale():g}")
    seen = f"the scale fell after steps {lowered}; it returned {skipped}"
    require(list(skipped) == lowered, "skipped-steps-not-named", seen)
    last = float(criterion(model(inputs[0]), batches[0][1]))
    require(last < first, "wrong-value", f"the loss went from {first:.3g} to {last:.3g}")


class _Infinite(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + float("inf")


class _NotANumber(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value - value


@exercise
def test_first_bad_layer(submission: Submission) -> None:
    """The first of several bad layers, including inf; no hooks left in the model."""
    model = nn.Sequential(nn.Linear(2, 2), _Infinite(), nn.Identity(), _NotANumber(), nn.Identity())
    given = submission.code.first_bad_layer(model, torch.ones(1, 2))
    what = "first_bad_layer, where layer 1 gives inf and layer 3 NaN,"
    compare(given, "1", what, {"only-nan": "3", "last-not-first": "4"})
    left = forward_hooks(model)
    require(not left, "hooks-left-behind", f"{left} hooks are still in the model")
    good = submission.code.first_bad_layer(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
    compare(good, None, "first_bad_layer of a good model")


@exercise
def test_choose_precision(submission: Submission) -> None:
    """The fastest that learns as well."""
    result = submission.code.Result
    results = {
        "fp32": result(1.0, 0.5),
        "bf16": result(0.5, 0.503),
        "fp16": result(0.4, float("nan")),
        "fp8": result(0.3, 0.6),
    }
    given = submission.code.choose_precision(results)
    known = {"fastest-but-wrong": "fp8", "nan-passes": "fp16"}
    compare(given, "bf16", f"choose_precision of {results}", known)
    small = {"fp32": result(1.0, 0.010), "bf16": result(0.5, 0.015)}
    given = submission.code.choose_precision(small)
    compare(given, "fp32", f"choose_precision of {small}", {"absolute-gap": "bf16"})
