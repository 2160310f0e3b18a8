"""Folders of images: one subfolder for each class."""

from collections.abc import Sequence
from pathlib import Path

from torchmuster.errors import Impossible
from torchmuster.units import plural


def image_classes(folder: str, *, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of a folder's subfolders, in alphabetical order: each is a class.

    ``known`` are the classes of the training data, of which a folder for evaluation may lack some.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise Impossible(
            f"image folder {folder!r} not found",
            why=f"searched in {Path.cwd()}",
            fix="check the path",
        )
    folders = [path for path in sorted(place.glob("[!.]*")) if path.is_dir()]
    classes = tuple(path.name for path in folders)
    if known is None and len(classes) < 2:
        raise Impossible(
            f"{folder} has {plural(len(classes), 'subfolder')}, but at least two are needed",
            why="each subfolder is a class",
            fix=f"create a subfolder of {folder} for each class, and put its images there",
        )
    for path in folders:
        if known is not None and path.name not in known:
            raise Impossible(
                f"{folder} has the class {path.name!r}, which the training data do not have",
                why=f"their classes are {', '.join(known[:10])}",
                fix="use the same names of subfolders, or move the subfolder away",
            )
        if not any(path.glob("[!.]*")):
            raise Impossible(
                f"{path} has no images",
                why="each subfolder is a class",
                fix="put the images of this class there, or remove the subfolder",
            )
    return classes
