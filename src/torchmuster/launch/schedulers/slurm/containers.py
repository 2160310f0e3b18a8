"""Node agents in containers: the flags of Slurm's plugin Pyxis, which starts containers with enroot.

The launcher stays outside the container, because it needs Slurm's programs; srun starts the node agents inside it. So
both need torchmuster, in the same version.
"""

from pathlib import Path

from torchmuster.errors import Impossible
from torchmuster.launch.job import Container, JobSpec
from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.launch.transports.local import NODE_AGENT


def container_for(
    image: str, mounts: str | None, *, folder: Path, runs: Path, python: str | None
) -> Container:
    """Return the container; it also gets the job's folder and the run folder, at the same paths."""
    if not image or not image.isprintable() or " " in image:
        raise Impossible(
            f"--container-image {image!r} is not a valid image",
            why="an image is a name with a tag, such as REGISTRY#NAME:TAG, or the path of a squashfs file",
            fix="--container-image team/train:1",
        )
    given = [mount for mount in (mounts or "").split(",") if mount]
    for mount in given:
        _check_mount(mount)
    needed = dict.fromkeys([folder.absolute(), (folder / runs).absolute()])
    for path in needed:
        if any(char in str(path) for char in ",:"):
            raise Impossible(
                f"{path} cannot be mounted into the container",
                why="a mount is SRC:DST, and mounts are separated by commas",
                fix="use a folder without , and : in its path",
            )
    inside = [Path(mount.split(":")[1]) for mount in given]
    for path in needed:
        if not any(path.is_relative_to(other) for other in inside):
            given.append(f"{path}:{path}")
            inside.append(path)
    return Container(image=image, mounts=tuple(given), python=python or "python3")


def _check_mount(mount: str) -> None:
    source, _, rest = mount.partition(":")
    target = rest.partition(":")[0]
    if not mount.isprintable() or not source.startswith("/") or not target.startswith("/"):
        raise Impossible(
            f"--container-mounts {mount!r} is not a valid mount",
            why="a mount is SRC:DST or SRC:DST:FLAGS with absolute paths; several are separated by commas",
            fix="--container-mounts /data:/data,/models:/models:ro",
        )


def agent_command(container: Container, folder: str) -> list[str]:
    """Return the end of srun's command line: the flags of Pyxis, and the node agent inside the container."""
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(container.mounts)}",
        f"--container-workdir={folder}",
        container.python,
        *NODE_AGENT,
    ]


def check_plugin(spec: JobSpec, ask: jobs.Ask = jobs.run_slurm_command) -> None:
    """Raise if srun is here and does not have the flags of Pyxis."""
    if spec.container is None:
        return
    answer = ask(["srun", "--help"])
    if answer is not None and answer.code == 0 and "--container-image" not in answer.out:
        raise Impossible(
            "this cluster's srun does not have --container-image",
            why="the plugin Pyxis, which starts containers, is not installed",
            fix="ask the cluster's administrators, or run muster without --container-image in another container: "
            "docs/slurm.md, Containers",
        )
