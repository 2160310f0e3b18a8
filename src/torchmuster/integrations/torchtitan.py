"""Record the metrics that torchtitan logs. Its checkpoints are DCP's, which every script's rank records."""

import contextlib
import functools
from types import ModuleType
from typing import Any

from torchmuster.integrations import recorder as recording


def watch_metrics(module: ModuleType) -> None:
    """Record what every ``MetricsProcessor`` logs from now on: mean and highest loss of all ranks, gradient norm."""
    kind = module.MetricsProcessor
    log = kind.log

    @functools.wraps(log)
    def logged(self: Any, step: int, *arguments: Any, **names: Any) -> Any:
        with contextlib.suppress(Exception):
            given = dict(zip(_NAMES, arguments, strict=False)) | names
            values = {own: given[name] for name, own in _NAMES.items() if name in given}
            recording.log(step, **values)
        return log(self, step, *arguments, **names)

    kind.log = logged


# The arguments of ``MetricsProcessor.log`` after the step, in their order.
_NAMES = {"global_avg_loss": "loss", "global_max_loss": "loss_max", "grad_norm": "grad_norm"}
