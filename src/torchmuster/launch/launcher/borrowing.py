"""A run that gave GPUs back, or borrowed more: what the launcher prints and logs."""

from collections.abc import Sequence

from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.launcher.training_progress import TrainingProgress
from torchmuster.runfolder import RunFolder


def change_text(change: protocol.DevicesChange) -> str:
    """Return ``gave back GPUs 2, 3 in 4.1 s: eva requested 2 GPUs``."""
    took = f"{change.seconds:.1f} s"
    if change.given_back:
        return f"gave back {_names(change.given_back)} in {took}: {change.reason}"
    borrowed = _names(change.borrowed) if change.borrowed else "no more GPUs after all"
    return f"borrowed {borrowed}: {change.reason}; the ranks saved in {took}"


def note_change(
    run: RunFolder, change: protocol.DevicesChange, progress: TrainingProgress | None = None
) -> str:
    """Log a change of the GPUs of a run; return it as text for the console."""
    what = change_text(change)
    if progress is not None:
        step = progress.saved or 0
        what += f"; restarting from step {step:,} with the same global batch size"
    run_state.log_event(
        run,
        run_state.GIVEN_BACK if change.given_back else run_state.BORROWED,
        what=what,
        gpus=list(change.given_back or change.borrowed),
        reason=change.reason,
        seconds=change.seconds,
        from_step=None if progress is None else progress.saved,
    )
    return what


def _names(labels: Sequence[str]) -> str:
    numbers = ", ".join(label.removeprefix("GPU ") for label in labels)
    return f"GPU {numbers}" if len(labels) == 1 else f"GPUs {numbers}"
