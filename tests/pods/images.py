"""An image for pods: it mounts this host's Python, and has the user's files in ``/home/muster``."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patience import GIVE_UP_S
from pods.podman import LABEL, Podman

ROOT = Path(__file__).resolve().parents[2]
HOME = "/home/muster"
USER_ID = 1000


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image, and the folders of this host that its pods mount read-only."""

    name: str
    mounts: tuple[Path, ...] = ()


def bytecode_cache() -> Path:
    """Return a folder with the compiled modules of a training; pods cannot write it, and compiling torch takes half a minute."""
    folder = ROOT / "build" / "pods-bytecode"
    done = folder / f"done-{sys.version_info.major}.{sys.version_info.minor}"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **bytecode_variables(folder)}
        subprocess.run([sys.executable, "-c", _IMPORTS], env=environment, check=True)
        done.touch()
    return folder


def bytecode_variables(folder: Path) -> dict[str, str]:
    """Return the variables with which Python uses such a folder."""
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


_IMPORTS = """
import importlib, pkgutil
import torch, torch.distributed.run, torch.distributed.checkpoint, torch.distributed.fsdp, torch.utils.data
import torchmuster
for part in ("cli", "launch", "worker", "train", "monitor", "checkpoints"):
    package = importlib.import_module(f"torchmuster.{part}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except Exception:
                pass  # an optional library, or a program
"""


def mounted_image(podman: Podman, lab: str, files: Mapping[str, str]) -> Image:
    """Import a nearly empty image; programs and Python come from this host."""
    links, mounts = [], [Path("/usr")]
    for name in ("bin", "sbin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            links.append((name, str(path.readlink())))
        elif path.exists():
            mounts.append(path)
    mounts += [Path("/etc", name) for name in ("alternatives", "ssl", "ld.so.cache")]
    # The environment, the interpreter that it is made of, and the source that is installed in it.
    cache = bytecode_cache()
    for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        if not any(path.is_relative_to(mount) for mount in mounts):
            mounts.append(path)
    mounts = [mount for mount in mounts if mount.exists()]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folders = {Path("/", name) for name in ("proc", "sys", "dev", "run", "etc", "tmp", "runs")}
        for mount in mounts:
            folders.update(mount.parents[:-1], [mount] if mount.is_dir() else [])
        for folder in sorted(folders | {Path("/home")}):  # parents first
            _add_folder(tar, str(folder.relative_to("/")), 0o755)
        for name, target in links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        _add_file(tar, "etc/passwd", _PASSWD)
        _add_file(tar, "etc/group", f"root:x:0:\nmuster:x:{USER_ID}:\n")
        _add_folder(tar, HOME[1:], 0o755, USER_ID)
        for name, text in files.items():
            _add_file(tar, f"{HOME[1:]}/{name}", text)
    name = f"localhost/{lab}:mounted"
    settings = (
        f"USER={USER_ID}",
        f"WORKDIR={HOME}",
        f"ENV=PATH={sys.prefix}/bin:/usr/bin:/bin",
        f"ENV=PYTHONPYCACHEPREFIX={cache}",
        f"LABEL={LABEL}={lab}",
    )
    changes = [word for setting in settings for word in ("--change", setting)]
    _import(podman, buffer.getvalue(), [*changes, "-", name])
    return Image(name=name, mounts=tuple(mounts))


_PASSWD = f"root:x:0:0:root:/root:/bin/sh\nmuster:x:{USER_ID}:{USER_ID}:muster:{HOME}:/bin/sh\n"


def _add_folder(tar: tarfile.TarFile, name: str, mode: int, owner: int = 0) -> None:
    folder = tarfile.TarInfo(name)
    folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, mode, owner, owner
    tar.addfile(folder)


def _add_file(tar: tarfile.TarFile, name: str, text: str) -> None:
    file = tarfile.TarInfo(name)
    content = text.encode()
    file.size, file.mode = len(content), 0o644
    tar.addfile(file, io.BytesIO(content))


def _import(podman: Podman, content: bytes, arguments: list[str]) -> None:
    done = subprocess.run(
        ["podman", "import", *arguments],
        env=podman.environment,
        input=content,
        capture_output=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 0, done.stderr.decode()
