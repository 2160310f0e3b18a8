"""Which checkpoints a person means: those of a run, of a folder or of a URL, or one of them."""

from dataclasses import dataclass
from pathlib import Path

from torchmuster.checkpoints.places import open_store, place_of
from torchmuster.checkpoints.store import Store, step_of
from torchmuster.checkpoints.verify import newest_first
from torchmuster.config.resolve import resolve
from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError, Impossible
from torchmuster.redaction import harmless
from torchmuster.runfolder import RunFolder, find


@dataclass(frozen=True, kw_only=True)
class Meant:
    """A store, one of its checkpoints if one was named, and the run if they are a run's."""

    store: Store
    wanted: str = ""
    run: RunFolder | None = None

    def names(self) -> list[str]:
        """Return the names of the checkpoints that are meant, the newest first."""
        names = newest_first(self.store)
        if not self.wanted:
            return names
        step = int(self.wanted) if self.wanted.isdecimal() and len(self.wanted) < 16 else None
        chosen = [
            one
            for one in names
            if one == self.wanted or (step is not None and step_of(one) == step)
        ]
        if not chosen:
            known = ", ".join(names[:5])
            raise Impossible(
                f"there is no checkpoint {harmless(self.wanted)!r} in {self.store.where}",
                why=f"the newest are: {known}" if known else "there is none at all",
                fix="give a name, or the number of a step: muster checkpoint ls shows them",
            )
        return chosen

    def model_files(self) -> Path | None:
        """Return the folder with what belongs to the run's model next to its weights, if the run has one."""
        return self.run.model if self.run is not None and self.run.model.is_dir() else None

    def is_own_model(self) -> bool:
        """Say whether the weights are of a model that the user's code builds, which alone knows their names."""
        settings = _settings_of(self.run) if self.run is not None else None
        if settings is None:
            return False
        return settings.model.build is not None and settings.model.lora_rank is None

    def dtype(self) -> str:
        """Return the dtype that the run holds the weights of its base model in."""
        settings = _settings_of(self.run) if self.run is not None else None
        return (settings.model.torch_dtype if settings else None) or "float32"


def meant_by(place: str, wanted: str, *, runs: Path) -> Meant:
    """Find what is meant by a run's id or folder, a folder, a URL, or one checkpoint's own folder or name."""
    if step_of(place) is not None and not wanted:
        place, wanted = "last", place
    parent, _, last = place.rstrip("/").rpartition("/")
    if parent and step_of(last) is not None:
        place, wanted = parent, last
    if "://" in place:
        return Meant(store=open_store(place), wanted=wanted)
    folder = Path(place)
    if folder.is_dir() and not RunFolder(folder).marker.is_file():
        return Meant(store=open_store(folder), wanted=wanted, run=_run_above(folder))
    run = find(place, runs)
    settings = _settings_of(run)
    given = settings.checkpoint.folder if settings else None
    return Meant(store=open_store(place_of(run, given)), wanted=wanted, run=run)


def _run_above(folder: Path) -> RunFolder | None:
    run = RunFolder(folder.absolute().parent)
    return run if run.marker.is_file() else None


def _settings_of(run: RunFolder) -> Settings | None:
    """Return the settings that a run was started with; a script of one's own has none."""
    if not run.config.is_file():
        return None
    try:
        return resolve(file=run.config).settings
    except ConfigError:  # of another version; its checkpoints may be readable all the same
        return None
