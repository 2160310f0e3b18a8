"""The libraries for collectives: NCCL between NVIDIA GPUs, gloo between CPUs."""

from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import installed
from torchmuster.diagnose.machine.torch_build import read_build
from torchmuster.finding import Finding, Status

# Since this release torch's store uses libuv by default.
_LIBUV_SINCE = (2, 4)


def _nccl(surroundings: Surroundings) -> Iterator[Finding]:
    build = read_build(surroundings)
    if build is None:
        return  # reported by torch-whole
    wheels = [
        one
        for one in installed.packages(surroundings)
        if one.name.startswith("nvidia-nccl") and build.cuda
    ]
    if len({(one.name, one.version) for one in wheels}) > 1:
        names = ", ".join(f"{one.name} {one.version}" for one in wheels)
        keep = next(
            (one for one in wheels if build.cuda and _is_for(one.name, build.cuda)), wheels[0]
        )
        others = " ".join(dict.fromkeys(one.name for one in wheels if one.name != keep.name))
        yield Finding(
            name="two-nccl",
            status=Status.WARNING,
            what=f"NCCL is installed more than once: {names}",
            why="their libraries overwrite or shadow each other, so torch may load one that it was "
            "not built with",
            fix=(f"{surroundings.python} -m pip uninstall -y {others}\n" if others else "")
            + f"{surroundings.python} -m pip install --force-reinstall --no-deps "
            f"{keep.name}=={keep.version}",
        )
    else:
        nccl = f"NCCL {wheels[0].version}, gloo" if wheels else "gloo"
        inside = build.cuda and not wheels and surroundings.system != "win32"
        brought = "NCCL inside torch, gloo" if inside else nccl
        yield Finding(name="collective-libraries", status=Status.OK, what=brought)


def _is_for(name: str, cuda: str) -> bool:
    return name.endswith(f"-cu{cuda.partition('.')[0]}")


def _libuv(surroundings: Surroundings) -> Iterator[Finding]:
    build = read_build(surroundings)
    if build is None or installed.release(build.version)[:2] < _LIBUV_SINCE:
        return
    told = surroundings.environment.get("USE_LIBUV") == "0"
    if told or (build.folder / "lib" / "uv.dll").exists():
        return
    yield Finding(
        name="torch-without-libuv",
        status=Status.WARNING,
        what=f"torch {build.version} is built without libuv",
        why="torchrun fails with “use_libuv was requested but PyTorch was build without libuv "
        "support”",
        fix='$env:USE_LIBUV = "0"  # in PowerShell; in cmd.exe: set USE_LIBUV=0',
        evidence=f"{build.folder / 'lib' / 'uv.dll'} does not exist",
    )


CHECKS = (
    Check(
        name="collective-libraries",
        asks="Is NCCL installed once, in the version that this torch was built with?",
        run=_nccl,
    ),
    Check(
        name="libuv",
        asks="Can torch's store start on Windows?",
        run=_libuv,
        systems=("win32",),
    ),
)
