"""Checkpoints as libraries write them, from bytes, without torch; and the lines that a rank records about them."""

import json
import zipfile
from pathlib import Path

from torchmuster.runfolder import RunFolder


def torch_file(path: Path, *, size: int = 4096) -> Path:
    """Write a file as ``torch.save`` does: an uncompressed zip archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr(f"{path.stem}/data/0", bytes(range(256)) * (size // 256))
        archive.writestr(f"{path.stem}/version", b"3\n")
    return path


def safetensors_file(path: Path, *, size: int = 1024, dtype: str = "F32") -> Path:
    """Write a file as safetensors does."""
    tensor = {"dtype": dtype, "shape": [size // 4], "data_offsets": [0, size]}
    head = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(size))
    return path


def trainer_folder(path: Path, *, step: int = 40, ranks: int = 2, shards: int = 0) -> Path:
    """Write a checkpoint as Hugging Face's Trainer does; with ``shards``, its model in several files."""
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    for name in names or ["model.safetensors"]:
        safetensors_file(path / name)
    if names:
        content = {
            "metadata": {},
            "weight_map": {f"layer.{n}": name for n, name in enumerate(names)},
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(content))
    (path / "config.json").write_text("{}")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt"):
        torch_file(path / name)
    for rank in range(ranks):
        torch_file(path / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def accelerate_folder(path: Path, *, ranks: int = 2) -> Path:
    """Write a checkpoint as ``Accelerator.save_state`` does."""
    safetensors_file(path / "model.safetensors")
    for name in ("optimizer.bin", "scheduler.bin"):
        torch_file(path / name)
    for rank in range(ranks):
        torch_file(path / f"random_states_{rank}.pkl")
    return path


def cut(path: Path, share: float = 0.5) -> None:
    """Leave only the beginning of a file."""
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def record(
    run: RunFolder,
    path: Path | str,
    step: int,
    *,
    library: str = "transformers",
    at_unix_s: float = 1_000.0,
    size: int = 5000,
    renamed_from: Path | None = None,
) -> None:
    """Add the line that a rank records when its script has saved, or renamed what it saved."""
    line = {"step": step, "path": str(path), "library": library, "bytes": size}
    if renamed_from is not None:
        line["renamed_from"] = str(renamed_from)
    run.metrics.mkdir(exist_ok=True)
    with (run.metrics / "saves.jsonl").open("a") as stream:
        stream.write(json.dumps({**line, "at_unix_s": at_unix_s}) + "\n")
