"""Where a training stands is read from its folder; whatever cannot be read is not known."""

from dataclasses import replace
from pathlib import Path

from script_checkpoints import cut, record, torch_file
from torchmuster.checkpoints import manifest
from torchmuster.checkpoints.store import open_store
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.restart import TrainingProgress, read_training_progress
from torchmuster.runfolder import create_run_folder

NOTHING = TrainingProgress()
SCRIPT = JobSpec(name="x", command=("x.py",), folder="/")


def saves(folder: Path) -> JobSpec:
    return replace(SCRIPT, checkpoints=str(folder / "checkpoints"))


def save(folder: Path, step: int) -> str:
    store = open_store(folder / "checkpoints")
    name = manifest.new_name(step)
    manifest.commit_checkpoint(
        store,
        manifest.Manifest(
            name=name,
            step=step,
            world_size=2,
            strategy="ddp",
            global_batch_size=64,
            made_unix_s=0.0,
            files={},
        ),
    )
    return name


def test_a_program_that_does_not_save_is_not_looked_into(tmp_path: Path) -> None:
    save(tmp_path, 7)
    ours = replace(SCRIPT, command=("torchmuster.worker",), module=True)
    assert read_training_progress(ours, tmp_path, NOTHING) == TrainingProgress()


def test_of_a_script_what_its_rank_recorded_counts(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path, "x")

    def look() -> TrainingProgress:
        return read_training_progress(SCRIPT, run.metrics, NOTHING)

    assert (look().checkpoint, look().saved) == (None, None)
    last = torch_file(tmp_path / "last.pt")
    record(run, last, 10, library="torch.save", at_unix_s=1000.0)
    first = look()
    assert first.saved == 10
    record(run, last, 20, library="torch.save", at_unix_s=1001.0)
    second = look()
    assert second.saved == 20
    assert second.checkpoint != first.checkpoint  # although it has the same name
    cut(last)
    assert look().checkpoint is None
    assert look().resume is not None


def test_the_newest_committed_checkpoint_counts(tmp_path: Path) -> None:
    save(tmp_path, 10)
    name = save(tmp_path, 20)
    (tmp_path / "checkpoints" / manifest.new_name(30)).mkdir()  # not committed
    found = read_training_progress(saves(tmp_path), tmp_path, NOTHING)
    assert found == TrainingProgress(checkpoint=name, saved=20, global_batch_size=64)


def test_what_was_known_of_checkpoints_stays_true_while_they_cannot_be_read(tmp_path: Path) -> None:
    """Else the next look would take an old checkpoint for a newer one, and restarts had no end."""
    known = TrainingProgress(checkpoint="step-00000020-aaaa", saved=20, global_batch_size=64)
    nowhere = replace(SCRIPT, checkpoints="no-such-protocol://bucket/run")
    assert read_training_progress(nowhere, tmp_path, known) == known
    assert read_training_progress(nowhere, tmp_path, NOTHING) == NOTHING
    assert read_training_progress(saves(tmp_path), tmp_path, known) == NOTHING
