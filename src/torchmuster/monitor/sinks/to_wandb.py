"""W&B: one run with the same id per run folder, or offline files for ``wandb sync``."""

import os
from collections.abc import Sequence
from typing import Any

from torchmuster.monitor.sinks.sink import Row, Wanted, settings_of
from torchmuster.runfolder import RunFolder


class WandB:
    """Sends rows with the W&B library.

    Its key is read from the environment, only in online mode.
    """

    def __init__(self, run: RunFolder, wanted: Wanted, known: str) -> None:
        import wandb

        self.run = known or run.id
        self._run: Any = wandb.init(
            id=self.run,
            name=run.id,
            project=os.environ.get("WANDB_PROJECT", wanted.experiment),
            dir=str(run.metrics),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            resume="allow",
            config=dict(settings_of(run)),
            # This is not the training process: do not record its output and resource usage.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )

    def write(self, rows: Sequence[Row]) -> None:
        """Send rows; rows of the same step are merged."""
        for row in rows:
            self._run.log(dict(row.numbers), step=row.step)

    def take_back(self, step: int) -> bool:
        """Return False: W&B rejects a step that is lower than the previous one."""
        return False

    def close(self, *, finished: bool) -> None:
        """Record how the run ended, and wait until W&B has received everything."""
        self._run.finish(exit_code=0 if finished else 1)
