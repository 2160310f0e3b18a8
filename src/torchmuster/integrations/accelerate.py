"""Record what an Accelerate script logs and saves, through ``Accelerator.log`` and ``Accelerator.save_state``."""

import inspect
from types import ModuleType
from typing import Any

from torchmuster.integrations import recorder as recording
from torchmuster.integrations.wrap import Call, wrap


def _log(self: Any, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
    """Have the arguments of ``Accelerator.log``."""


LOG = inspect.signature(_log)


def watch_accelerator(module: ModuleType) -> None:
    """Record what every ``Accelerator`` logs and saves from now on."""

    def logged(call: Call) -> None:
        arguments = call.arguments
        if "args" in arguments:  # a decorator of Accelerate hides the names
            arguments = LOG.bind(*arguments["args"], **arguments.get("kwargs", {})).arguments
        record_values(arguments["values"], arguments.get("step"))

    def saved(call: Call) -> None:
        if recording.recorder is not None and call.result is not None:
            place = str(call.result)
            recording.recorder.saved(place, library="accelerate", seconds=call.seconds)

    wrap(module.Accelerator, "log", before=logged)
    wrap(module.Accelerator, "save_state", after=saved, saves=True)


def record_values(values: dict[str, Any], step: int | None = None) -> None:
    """Record values that were logged; names that begin with ``eval`` or ``val`` are an evaluation."""
    recorder = recording.recorder
    if recorder is None:
        return
    evaluated = {k: v for k, v in values.items() if k.lower().startswith(("eval", "val"))}
    if evaluated:
        recorder.evaluated(evaluated, step)
    if len(evaluated) < len(values):
        recorder.log({k: v for k, v in values.items() if k not in evaluated}, step)
