"""The configuration of a model of transformers, read without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmuster.plan.job import Work


def configuration(work: Work) -> Mapping[str, Any] | None:
    """Return a model's config.json from its folder, or from what the hub's cache has of it; None if there is none."""
    place = _place(work)
    if place is None:
        return None
    try:
        told = json.loads(place.read_text())
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def weights_dtype(work: Work) -> str:
    """Return the type of a model's weights as a training has it: float32 unless told; auto is what the files say."""
    if work.torch_dtype != "auto":
        return work.torch_dtype or "float32"
    told = configuration(work) or {}
    return str(told.get("dtype") or told.get("torch_dtype") or "float32")


def _place(work: Work) -> Path | None:
    name = work.model_name_or_path
    if name is None:
        return None
    folder = Path(work.folder, Path(name).expanduser())
    if folder.is_dir():
        return folder / "config.json"
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # it comes with transformers, which not everybody has
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of the hub's kind
        return None
    return Path(found) if isinstance(found, str) else None
