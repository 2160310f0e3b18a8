"""Images for pods: one that mounts this host's Python in seconds, and the one of deploy/Dockerfile.

Both have the user's files in ``/home/muster``, as an image that is built ``FROM`` the product's image has.
"""

import io
import os
import shutil
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
_BUILD_WITHIN_S = 1200


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
        _call(sys.executable, "-c", _IMPORTS, **bytecode_variables(folder))
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


def product_image(podman: Podman, lab: str, work: Path) -> Image:
    """Build deploy/Dockerfile on a Debian root file system, without a package registry."""
    base, name = f"localhost/{lab}:base", f"localhost/{lab}:product"
    root = work / "root"
    include = "--include=python3,python3-venv,ca-certificates"
    _call("debootstrap", "--variant=minbase", include, "bookworm", root)
    _call("tar", "-C", root, "-cf", work / "root.tar", ".")
    shutil.rmtree(root)
    podman("import", "--change", f"LABEL={LABEL}={lab}", work / "root.tar", base)
    (work / "root.tar").unlink()
    context = work / "context"
    (context / "deploy").mkdir(parents=True)
    shutil.copy(ROOT / "deploy/Dockerfile", context / "deploy")
    wheels = context / "dist"
    pip = (sys.executable, "-m", "pip")
    _call(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT)
    # The CPU build that is installed here: torch's own wheel for GPUs has 5 GB.
    (wheel,) = wheels.glob("torchmuster-*.whl")
    _call(*pip, "download", "-q", "-d", wheels, "torch==2.13.0", wheel)
    flags = "--no-index --find-links /tmp/dist"
    arguments = ("--build-arg", f"BASE={base}", "--build-arg", f"PIP_FLAGS={flags}")
    file = context / "deploy/Dockerfile"
    podman("build", "-f", file, "-t", name, "--label", f"{LABEL}={lab}", *arguments, context)
    shutil.rmtree(context)
    return Image(name=name)


def image_with_files(
    podman: Podman, lab: str, product: Image, work: Path, files: Mapping[str, str]
) -> Image:
    """Add the user's files to the product's image, as a user's own Dockerfile does."""
    work.mkdir(parents=True)
    for name, text in files.items():
        (work / name).write_text(text)
    (work / "Dockerfile").write_text(f"FROM {product.name}\nCOPY . {HOME}\n")
    name = f"localhost/{lab}:built"
    podman("build", "-t", name, "--label", f"{LABEL}={lab}", work)
    return Image(name=name)


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


def _call(*words: object, **environment: str) -> None:
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_BUILD_WITHIN_S,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
