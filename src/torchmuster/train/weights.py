"""Write the weights of a trained model as safetensors files, laid out as transformers does.

A model of more than 2 GB becomes several files and an index. Shards are gathered one tensor at a
time, so no device ever holds the whole model; rank 0 keeps one file's content in host memory.
"""

import hashlib
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.checkpoints.export import files_of_weights, write_index
from torchmuster.errors import MusterError
from torchmuster.train.models.parameters import own_name
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World, all_gather_object
from torchmuster.units import plural

MOST_IN_A_FILE_BYTES = 2 * 10**9
_SHOWN = 5  # names in a message


def save_weights(
    model: nn.Module,
    strategy: Strategy,
    folder: Path,
    world: World,
    *,
    beside: Path | None = None,
    most_in_a_file_bytes: int = MOST_IN_A_FILE_BYTES,
) -> dict[str, str]:
    """Write a model's weights into a folder, under the model's own names; all ranks call it.

    The folder appears when it is complete, replaces an existing one, and gets the files of the
    folder ``beside``. Of tied parameters only the first is written, as transformers does. Return,
    on rank 0, the hash of each tensor for :func:`compare_hashes`.
    """
    state = strategy.state_dict(model)["model"]
    tied = _tied_names(model)
    tensors = {name: tensor for name, tensor in state.items() if name not in tied}
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    files = files_of_weights(sizes, most_in_a_file_bytes)
    return write_tensors(tensors, files, folder, world, beside=beside)


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    files: Mapping[str, list[str]],
    folder: Path,
    world: World,
    *,
    beside: Path | None = None,
    finish: Callable[[Path], None] = lambda unfinished: None,
) -> dict[str, str]:
    """Gather tensors and write them into these files of a folder; all ranks call it.

    ``finish`` may add files before the folder appears. Return, on rank 0, the hash of each tensor.
    """
    names = itertools.chain.from_iterable(files.values())
    gathered = _whole_tensors(tensors, names, world)
    problem = ""
    hashes: dict[str, str] = {}
    if world.is_first:
        try:
            with replaced_folder(folder) as unfinished:
                if beside is not None:
                    shutil.copytree(beside, unfinished, dirs_exist_ok=True)
                hashes = write_files(unfinished, gathered, files)
                finish(unfinished)
        except (OSError, SafetensorError) as error:
            problem = str(error)
    for _ in gathered:  # every rank takes part in gathering each tensor
        pass
    problem = all_gather_object(problem, world)[0]
    if problem:
        raise MusterError(
            f"cannot write the weights to {folder}",
            why=problem,
            fix="free disk space there, or write them to another folder",
        )
    return hashes


def write_files(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], files: Mapping[str, list[str]]
) -> dict[str, str]:
    """Write tensors, which come in the order of the files, and the index; return each one's hash.

    The files are readable by all whom the umask allows; ``save_file`` alone gives mode 600.
    """
    hashes: dict[str, str] = {}
    total_bytes = 0
    for file, names in files.items():
        content = dict(itertools.islice(tensors, len(names)))
        total_bytes += sum(tensor.nbytes for tensor in content.values())
        hashes.update({name: tensor_hash(tensor) for name, tensor in content.items()})
        path = folder / file
        path.touch()
        mode = stat.S_IMODE(path.stat().st_mode)
        save_file(content, path, metadata={"format": "pt"})
        path.chmod(mode)
    write_index(folder, files, total_bytes)
    return hashes


def tensor_hash(tensor: torch.Tensor) -> str:
    """Return the SHA-256 hash of a tensor's bytes, with its dtype and shape."""
    return hashlib.sha256(save({"tensor": tensor.detach().cpu().contiguous()})).hexdigest()


def compare_hashes(folder: Path, hashes: Mapping[str, str]) -> int:
    """Read the weights in a folder back; raise an error unless they are exactly these tensors.

    Return their number.
    """
    written: dict[str, str] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            written |= {name: tensor_hash(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    names = written.keys() | hashes.keys()
    wrong = [name for name in names if written.get(name) != hashes.get(name)]
    if wrong:
        raise MusterError(
            f"the written weights are wrong: {plural(len(wrong), 'tensor')} not equal to those of "
            "the trained model",
            why=some_names(wrong),
            fix="write them again; if this happens again, check the disk and the memory of this host",
        )
    return len(written)


def some_names(names: Sequence[object]) -> str:
    """Return the first names for a message, and how many more there are."""
    shown = ", ".join(sorted(map(str, names))[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` once complete; not after an error."""
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each try: what an earlier one left may not be deletable.
    stem = f".{folder.name}.{os.getpid()}.{os.urandom(2).hex()}"
    unfinished = folder.parent / f"{stem}.unfinished"
    unfinished.mkdir()
    try:
        yield unfinished
        if folder.exists():
            before = folder.parent / f"{stem}.before"
            folder.rename(before)
            unfinished.rename(folder)
            shutil.rmtree(before, ignore_errors=True)
        else:
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the shards of a tensor on the communication device; all ranks call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    home = tensor.device_mesh.device_type
    if tensor.device.type != home:  # offloaded to the host, from where nccl cannot send it
        return cast(DTensor, tensor.to(home)).full_tensor()
    return tensor.full_tensor()


def _tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that are tied to an earlier one."""
    first: set[int] = set()
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied.add(own_name(name))
        first.add(id(parameter))
    return tied


def _whole_tensors(
    tensors: Mapping[str, torch.Tensor], names: Iterable[str], world: World
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each full tensor, on rank 0 in host memory; the other ranks only help to gather it."""
    for name in names:
        tensor = whole_tensor(tensors[name].detach())
        if world.is_first:
            tensor = tensor.to("cpu", copy=True).contiguous()
        yield name, tensor
