"""Keep a trial from changing anything outside its own folder, and from uploading anything.

The script and its libraries run unchanged: a write elsewhere is refused with an error that names the path.
"""

import contextlib
import functools
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

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Caches belong to the libraries: what a trial adds to them is what any run adds.
_CACHES = (
    *("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME", "XDG_CACHE_HOME"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "MPLCONFIGDIR"),
)
_HOME_CACHES = (".cache", ".triton", ".nv", ".config/matplotlib")
_ALWAYS = ("/dev", "/proc", "/sys", "/tmp/nvidia-mps")  # noqa: S108  # the pipes of CUDA MPS
_UPLOADS = ("create_repo", "create_commit", "upload_file", "upload_folder", "upload_large_folder")


class WriteOutside(PermissionError):
    """The script wrote to a place outside the copy of its working folder."""


def allow_writes_only(folders: Sequence[str]) -> None:
    """Refuse writes outside these folders, temporary folders and caches, until the process ends.

    The kernel refuses them where it can; the audit hook names the path, and works on any kernel.
    """
    home = Path.home()
    allowed = [
        *folders,
        *_ALWAYS,
        tempfile.gettempdir(),  # of this trial
        *(os.environ[name] for name in _CACHES if os.environ.get(name)),
        *(str(home / name) for name in _HOME_CACHES),
    ]
    roots = tuple(str(Path(one).resolve()) for one in allowed)
    inside = tuple(f"{root}{os.sep}" for root in roots)

    def check(path: Any, folder: int | None = None) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor that is already open
        name = os.fsdecode(path)
        if folder is not None and folder >= 0:  # relative to an open folder
            name = str(Path(f"/proc/self/fd/{folder}").resolve() / name)
        place = os.path.realpath(name)
        if place.startswith(inside) or place in roots or "__pycache__" in place:
            return
        raise WriteOutside(
            f"muster prove: the script writes to {place}, outside the copy of its folder"
        )

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in mode for letter in "wax+") if mode else flags & _WRITE_FLAGS
            if writes:
                check(path)
        elif event == "shutil.rmtree":  # before anything is deleted
            check(arguments[0], arguments[1] if len(arguments) > 1 else None)
        elif event in ("os.remove", "os.rmdir"):
            check(arguments[0], arguments[1])
        elif event in ("os.truncate", "os.chmod", "os.chown", "os.utime"):
            check(arguments[0])
        elif event == "os.mkdir" and not Path(os.fsdecode(arguments[0])).is_dir():
            check(arguments[0], arguments[2])
        elif event == "os.rename":
            check(arguments[0], arguments[2])
            check(arguments[1], arguments[3])
        elif event == "os.link":  # the file itself could be written through it
            check(arguments[0])
            check(arguments[1])
        elif event == "os.symlink":
            check(arguments[1])

    sys.addaudithook(watch)
    if landlock.is_available():
        _create_caches(home)
        landlock.allow_writes_only(roots)
    # These open files in C++ and Rust, which no audit hook sees.
    torch.save = _checked_save(torch.save, check)
    _before_safetensors.append(lambda _, path: check(path))


def _create_caches(home: Path) -> None:
    """Create the caches of libraries: below a folder that does not exist, nothing can be allowed."""
    caches = [Path(os.environ[name]) for name in _CACHES if os.environ.get(name)]
    names = _HOME_CACHES if torch.cuda.is_available() else _HOME_CACHES[:1]
    for folder in [*caches, *(home / name for name in names)]:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)


def _checked_save(usual: Any, check: Any) -> Any:
    @functools.wraps(usual)
    def save(obj: Any, f: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            check(f)
        return usual(obj, f, *arguments, **named)

    return save


# Called with the tensors and the path of each file that safetensors writes.
_before_safetensors: list[Callable[[Any, Any], None]] = []


def before_safetensors(call: Callable[[Any, Any], None]) -> None:
    """Call a function before safetensors writes a file."""
    _before_safetensors.append(call)


def watch_safetensors() -> None:
    """Wrap ``save_file``; libraries import it by name, so this comes before their import."""
    when_imported("safetensors.torch", _wrap_save_file)


def _wrap_save_file(module: Any) -> None:
    usual = module.save_file

    @functools.wraps(usual)
    def save_file(tensors: Any, filename: Any, *arguments: Any, **named: Any) -> Any:
        for call in _before_safetensors:
            call(tensors, filename)
        return usual(tensors, filename, *arguments, **named)

    module.save_file = save_file


def block_uploads() -> None:
    """Replace uploads to the Hugging Face hub by a message."""
    when_imported("huggingface_hub.hf_api", _replace_uploads)


def _replace_uploads(module: Any) -> None:
    def replacement(name: str) -> Any:
        def blocked(*arguments: Any, **named: Any) -> Any:
            repository = named.get("repo_id", "")
            print(f"muster prove: blocked {name} {repository}", file=sys.stderr)
            return types.SimpleNamespace(repo_id=repository, url="", commit_url="", oid="")

        return blocked

    for name in _UPLOADS:
        setattr(module.HfApi, name, replacement(name))
        if hasattr(module, name):
            setattr(module, name, replacement(name))
