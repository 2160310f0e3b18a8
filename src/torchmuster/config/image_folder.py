"""Folders of images: one subfolder for each class."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.errors import Impossible
from torchmuster.units import plural

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
INSTALL = "pip install 'torchmuster[images]'"


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """The classes of a folder in alphabetical order, and its images, each with its class's number."""

    classes: tuple[str, ...]
    files: tuple[tuple[str, int], ...]


def find_images(folder: str, *, classes: Sequence[str] | None = None) -> ImageFiles:
    """List the images below a folder; ``classes`` are those of the training data, if known.

    Hidden files are ignored. Any other file that is not an image by its name is an error.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise Impossible(
            f"image folder {folder!r} not found",
            why=f"searched in {Path.cwd()}",
            fix="check the path",
        )
    entries = sorted(one for one in place.iterdir() if not one.name.startswith("."))
    loose = [one for one in entries if one.suffix.lower() in SUFFIXES and not one.is_dir()]
    if loose:
        raise Impossible(
            f"{loose[0]} belongs to no class",
            why=f"{folder} must have one subfolder for each class",
            fix="move the image into the subfolder of its class",
        )
    found = [one for one in entries if one.is_dir()]
    if classes is None and len(found) < 2:
        raise Impossible(
            f"{folder} has {plural(len(found), 'subfolder')}, but at least two are needed",
            why="each subfolder is a class",
            fix=f"create a subfolder of {folder} for each class, and put its images there",
        )
    names = tuple(one.name for one in found) if classes is None else tuple(classes)
    unknown = [one.name for one in found if one.name not in names]
    if unknown:
        raise Impossible(
            f"{folder} has the class {unknown[0]!r}, which the training data do not have",
            why=f"their classes are {', '.join(names[:10])}",
            fix="use the same names of subfolders, or move the subfolder away",
        )
    files: list[tuple[str, int]] = []
    for one in found:
        of_class = _images_below(one)
        if not of_class:
            raise Impossible(
                f"{one} has no images",
                why=f"images are {', '.join(SUFFIXES)} files",
                fix="put the images of this class there, or remove the subfolder",
            )
        number = names.index(one.name)
        files += [(path, number) for path in of_class]
    return ImageFiles(classes=names, files=tuple(files))


def check_first_images(found: ImageFiles) -> None:
    """Check the headers of the first image of each class with Pillow; decode none of them."""
    first = {number: path for path, number in reversed(found.files)}
    for path in first.values():
        try:
            with _pillow().open(path) as image:
                image.verify()
        except (OSError, SyntaxError, ValueError) as error:
            raise broken_image(path, error) from error


def read_image(path: str) -> Any:
    """Return an image as Pillow's, in RGB."""
    try:
        with _pillow().open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise broken_image(path, error) from error


def broken_image(path: str, error: Exception) -> Impossible:
    """Return the error for a file that Pillow cannot read."""
    return Impossible(
        f"{path} is not an image that Pillow can read",
        why=f"{type(error).__name__}: {error}",
        fix="remove or replace this file",
    )


def _images_below(folder: Path) -> list[str]:
    images = []
    for home, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for name in sorted(names):
            if name.startswith("."):
                continue
            path = os.path.join(home, name)  # noqa: PTH118  # a million Path objects are slow
            if not name.lower().endswith(SUFFIXES):
                raise Impossible(
                    f"{path} is not an image",
                    why=f"images are {', '.join(SUFFIXES)} files",
                    fix="move this file away, or convert it",
                )
            images.append(path)
    return images


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise Impossible(
            "images need Pillow, which is not installed", why=str(error), fix=INSTALL
        ) from error
    return Image
