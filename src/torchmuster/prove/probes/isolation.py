"""Keep a trial from changing anything outside its own folder, and from uploading anything.

The script and its libraries run unchanged: a write elsewhere is refused with ``PermissionError``.
"""

import sys
import tempfile
import types
from collections.abc import Sequence
from typing import Any

from torchmuster.integrations.import_hooks import when_imported
from torchmuster.prove import landlock
from torchmuster.prove.caches import cache_folders
from torchmuster.prove.probes.replacing import replace

_ALWAYS = ("/dev", "/proc", "/sys", "/tmp/nvidia-mps")  # noqa: S108  # the pipes of CUDA MPS
_UPLOADS = ("create_repo", "create_commit", "upload_file", "upload_folder", "upload_large_folder")


def allow_writes_only(folders: Sequence[str]) -> None:
    """Refuse writes outside these folders, temporary folders and caches, until the process ends.

    Where the kernel has no Landlock, nothing is refused, and the result of the proof says so.
    """
    if landlock.is_available():
        caches = map(str, cache_folders().values())
        landlock.allow_writes_only([*folders, *_ALWAYS, tempfile.gettempdir(), *caches])


def block_uploads() -> None:
    """Replace uploads to the hub once its library is imported; libraries import them by name."""
    when_imported("huggingface_hub.hf_api", _block_uploads)


def _block_uploads(module: Any) -> None:
    def blocked(usual: Any, *_: Any, repo_id: str = "", **__: Any) -> Any:
        print(f"muster prove: blocked {usual.__name__} {repo_id}", file=sys.stderr)
        return types.SimpleNamespace(repo_id=repo_id, url="", commit_url="", oid="")

    for name in _UPLOADS:
        for owner in (module.HfApi, module):
            if hasattr(owner, name):
                replace(owner, name, blocked)
