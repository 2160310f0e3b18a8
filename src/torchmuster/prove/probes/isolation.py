"""Keep a trial from changing anything outside its own folder, and from uploading anything.

The script and its libraries run unchanged: a write elsewhere is refused with an error that names the path.
"""

import contextlib
import os
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchmuster.integrations.import_hooks import when_imported
from torchmuster.prove import landlock
from torchmuster.prove.probes.replacing import replace

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Caches belong to the libraries: what a trial adds to them is what any run adds.
_CACHES = (
    *("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME", "XDG_CACHE_HOME"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "MPLCONFIGDIR"),
)
_HOME_CACHES = (".cache", ".triton", ".nv", ".config/matplotlib")
_ALWAYS = ("/dev", "/proc", "/sys", "/tmp/nvidia-mps")  # noqa: S108  # the pipes of CUDA MPS
_UPLOADS = ("create_repo", "create_commit", "upload_file", "upload_folder", "upload_large_folder")
# Audit event -> which of its arguments are paths that change. Through a hard link its file could be written.
_CHANGES = {
    "shutil.rmtree": [0],  # before anything is deleted
    "os.remove": [0],
    "os.rmdir": [0],
    "os.truncate": [0],
    "os.chmod": [0],
    "os.chown": [0],
    "os.utime": [0],
    "os.mkdir": [0],
    "os.rename": [0, 1],
    "os.link": [0, 1],
    "os.symlink": [1],
}
# The argument that is the open folder to which a path is relative.
_FOLDERS = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}
# Called with the tensors and the path of each file that safetensors writes.
_before_safetensors: list[Callable[[Any, Any], None]] = []


class WriteOutside(PermissionError):
    """The script wrote to a place outside the copy of its working folder."""


def allow_writes_only(folders: Sequence[str]) -> None:
    """Refuse writes outside these folders, temporary folders and caches, until the process ends.

    The kernel refuses them where it can; the audit hook names the path, and works on any kernel.
    """
    names = _HOME_CACHES if torch.cuda.is_available() else _HOME_CACHES[:1]
    caches = [Path.home() / name for name in names]
    caches += [Path(os.environ[name]) for name in _CACHES if os.environ.get(name)]
    for cache in caches:  # below a folder that does not exist, nothing can be allowed
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
    allowed: list[str | Path] = [*folders, *_ALWAYS, tempfile.gettempdir(), *caches]
    roots = tuple(str(Path(folder).resolve()) for folder in allowed)

    def check(path: Any, folder: int = -1) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor that is already open
        name = os.fsdecode(path)
        if folder >= 0:
            name = str(Path(f"/proc/self/fd/{folder}").resolve() / name)
        target = Path(os.path.realpath(name))
        if any(target.is_relative_to(root) for root in roots) or "__pycache__" in target.parts:
            return
        raise WriteOutside(
            f"muster prove: the script writes to {target}, outside the copy of its folder"
        )

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = flags & _WRITE_FLAGS
            if mode:
                writes = not set(mode).isdisjoint("wax+")
            if writes:
                check(path)
        elif event in _CHANGES:
            if event == "os.mkdir" and Path(os.fsdecode(arguments[0])).is_dir():
                return  # it changes nothing
            folder = -1
            if event in _FOLDERS:
                folder = arguments[_FOLDERS[event]]
            for index in _CHANGES[event]:
                check(arguments[index], folder)

    def save(usual: Any, obj: Any, f: Any, *arguments: Any, **named: Any) -> Any:
        check(f)
        return usual(obj, f, *arguments, **named)

    sys.addaudithook(watch)
    if landlock.is_available():
        landlock.allow_writes_only(roots)
    # These open files in C++ and Rust, which no audit hook sees.
    replace(torch, "save", save)
    before_safetensors(lambda _, path: check(path))


def before_safetensors(call: Callable[[Any, Any], None]) -> None:
    """Call a function before safetensors writes a file."""
    _before_safetensors.append(call)


def watch_libraries() -> None:
    """Wrap what libraries import by name, before their import: ``save_file``, and uploads to the hub."""
    when_imported("safetensors.torch", lambda module: replace(module, "save_file", _save_file))
    when_imported("huggingface_hub.hf_api", _block_uploads)


def _save_file(usual: Any, tensors: Any, filename: Any, *arguments: Any, **named: Any) -> Any:
    for call in _before_safetensors:
        call(tensors, filename)
    return usual(tensors, filename, *arguments, **named)


def _block_uploads(module: Any) -> None:
    def blocked(usual: Any, *_: Any, repo_id: str = "", **__: Any) -> Any:
        print(f"muster prove: blocked {usual.__name__} {repo_id}", file=sys.stderr)
        return types.SimpleNamespace(repo_id=repo_id, url="", commit_url="", oid="")

    for name in _UPLOADS:
        for owner in (module.HfApi, module):
            if hasattr(owner, name):
                replace(owner, name, blocked)
