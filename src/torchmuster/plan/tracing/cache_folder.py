"""Where traces and measured rates are kept from one plan to the next."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder: in the user's cache, as the XDG rules have it."""
    own = environment.get("XDG_CACHE_HOME", "")
    base = Path(own) if Path(own).is_absolute() else Path.home() / ".cache"
    return base / "torchmuster" / "plan"
