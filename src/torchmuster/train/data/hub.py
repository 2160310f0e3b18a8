"""Datasets of the Hugging Face kind, by folder or name."""

from pathlib import Path
from typing import Any

from torchmuster.errors import Impossible

INSTALL = "pip install 'torchmuster[datasets]'"


def open_dataset(name_or_path: str, split: str) -> Any:
    """Open a dataset: a folder that ``save_to_disk`` wrote, a folder of files, or a name on the hub."""
    try:
        import datasets
    except ImportError as error:
        raise Impossible(
            "datasets by name or folder need datasets, which is not installed",
            why=str(error),
            fix=INSTALL,
        ) from error
    folder = Path(name_or_path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            found = datasets.load_from_disk(str(folder))
            return _one_of(found, name_or_path, split)
        return datasets.load_dataset(str(folder) if folder.is_dir() else name_or_path, split=split)
    except (OSError, ValueError) as error:
        raise Impossible(
            f"the dataset {name_or_path!r} cannot be opened, split {split!r}",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="give a folder, or a name that can be fetched from the hub here; without a network: "
            f"fetch it elsewhere with hf download --repo-type dataset {name_or_path} --local-dir FOLDER",
        ) from error


def _one_of(found: Any, name: str, split: str) -> Any:
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise Impossible(
            f"the dataset {name!r} has no split {split!r}",
            why=f"it has {', '.join(found)}",
            fix="give data.split with one of them",
        )
    return found[split]
