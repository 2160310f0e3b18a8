"""Open a store from a folder or a URL."""

from pathlib import Path

from torchmuster.checkpoints.local import FolderStore
from torchmuster.checkpoints.store import Store
from torchmuster.errors import Impossible
from torchmuster.redaction import redact_text
from torchmuster.runfolder import RunFolder


def open_store(place: str | Path) -> Store:
    """Open a folder, or a URL that fsspec supports (``s3://bucket/prefix``); create nothing yet."""
    text = str(place)
    if text.startswith("file://"):
        return FolderStore(Path(text.removeprefix("file://")))
    if "://" not in text:
        return FolderStore(Path(text).expanduser())
    from torchmuster.checkpoints.object_storage import ObjectStore  # importing fsspec is slow

    try:
        return ObjectStore.at(text)
    except (ImportError, ValueError) as error:
        protocol = text.split("://", 1)[0]
        raise Impossible(
            f"cannot access checkpoints at {protocol}://",
            why=redact_text(str(error)),
            fix="pip install 'torchmuster[s3]'"
            if protocol in ("s3", "s3a")
            else "install the package that fsspec names for it",
        ) from None


def place_of(run: RunFolder, folder: str | None) -> str:
    """Return where a run's checkpoints are: its folder, or a subfolder of the given location."""
    return f"{folder.rstrip('/')}/{run.id}" if folder else str(run.checkpoints)
