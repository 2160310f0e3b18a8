"""Record what an Accelerate script logs and saves.

``muster run`` wraps ``Accelerator.log`` and ``Accelerator.save_state`` by itself. A script that logs through a tracker object
can pass one: ``Accelerator(log_with=MusterTracker())``.
"""

import contextlib
import functools
import time
from types import ModuleType
from typing import Any

from torchmuster.integrations import recorder as recording


def watch_accelerator(module: ModuleType) -> None:
    """Record what every ``Accelerator`` logs and saves from now on."""
    kind = module.Accelerator
    log, save_state = kind.log, kind.save_state

    @functools.wraps(log)
    def logged(
        self: Any, values: dict[str, Any], step: int | None = None, *more: Any, **names: Any
    ) -> Any:
        with contextlib.suppress(Exception):
            record_values(values, step)
        return log(self, values, step, *more, **names)

    @functools.wraps(save_state)
    def saved(self: Any, *arguments: Any, **names: Any) -> Any:
        recorder = recording.recorder
        if recorder is None:
            return save_state(self, *arguments, **names)
        began = time.perf_counter()
        with recorder.library_saves():
            place = save_state(self, *arguments, **names)
        if place is not None:
            took_s = time.perf_counter() - began
            recorder.saved(str(place), library="accelerate", seconds=took_s)
        return place

    kind.log, kind.save_state = logged, saved


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


def __getattr__(name: str) -> Any:
    """Create the tracker class on first use, because its base class comes from Accelerate."""
    if name != "MusterTracker":
        raise AttributeError(name)
    from accelerate.tracking import GeneralTracker

    class MusterTracker(GeneralTracker):  # type: ignore[misc]
        """An Accelerate tracker that records for ``muster run``."""

        name = "muster"
        requires_logging_directory = False

        @property
        def tracker(self) -> None:
            """None: there is no underlying tracker object."""

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """Ignore the configuration: it is in the run folder."""

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            """Record values."""
            record_values(values, step)

    return MusterTracker
