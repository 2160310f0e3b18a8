"""Folders of images: one subfolder for each class."""

from pathlib import Path

from torchmuster.errors import Impossible


def image_classes(folder: str) -> tuple[str, ...]:
    """Return the names of a folder's subfolders, in alphabetical order: each is a class."""
    folders = [path for path in Path(folder).expanduser().glob("[!.]*") if path.is_dir()]
    if not folders:
        raise Impossible(
            f"no folder of images at {folder!r}",
            why=f"searched in {Path.cwd()}; each subfolder is a class",
            fix="check the path; put the images of each class into a subfolder of its own",
        )
    return tuple(sorted(path.name for path in folders))
