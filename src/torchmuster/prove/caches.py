"""Caches of libraries: what a run of a proof adds to them is what any run adds, so they may be written."""

import os
from pathlib import Path

# The variable that moves a cache, and where it is without one, below the home.
_CACHES = {
    "XDG_CACHE_HOME": ".cache",
    "TRITON_CACHE_DIR": ".triton",
    "CUDA_CACHE_PATH": ".nv",
    "HF_HOME": "",
    "HF_DATASETS_CACHE": "",
    "HF_HUB_CACHE": "",
    "TORCH_HOME": "",
    "TORCHINDUCTOR_CACHE_DIR": "",
    "TORCH_EXTENSIONS_DIR": "",
    "MPLCONFIGDIR": "",
}


def cache_folders() -> dict[str, Path]:
    """Return the caches of this user, by the variable that moves each of them."""
    folders = {}
    for name, usual in _CACHES.items():
        if os.environ.get(name):
            folders[name] = Path(os.environ[name])
        elif usual:
            folders[name] = Path.home() / usual
    return folders


def moved_caches(temporary: str) -> dict[str, str]:
    """Return variables that move each cache that does not exist yet below a temporary folder.

    The kernel can allow writes only below a folder that exists, and muster creates none in the user's home.
    """
    moved = {}
    for name, folder in cache_folders().items():
        if not folder.is_dir():
            moved[name] = f"{temporary}/{name}"
    return moved
