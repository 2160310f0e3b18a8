"""Train a tiny model of an architecture; check its final weights and exports of its checkpoint."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

import tiny_models
from torchmuster.checkpoints.export import ExportRequest, ExportResult, run_exporter
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.checkpoints.store import FolderStore
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.written import settings_yaml
from torchmuster.errors import MusterError
from torchmuster.runfolder import RunFolder
from torchmuster.train.weights import compare_hashes
from torchmuster.train.world import World, rank_zero_first
from torchmuster.worker import exported, training

MASKED = """
import torch

def rows():
    ids = torch.randint(5, 300, (16, 12), generator=torch.Generator().manual_seed(0))
    chosen = torch.arange(12) % 5 == 2
    return [
        {"input_ids": row.masked_fill(chosen, 4), "labels": row.masked_fill(~chosen, -100)}
        for row in ids
    ]
"""


def train_and_prove(
    world: World,
    folder: str,
    kind: str,
    settings: Mapping[str, str],
    exports: Mapping[str, Mapping[str, Any]],
    fresh: bool,
    damage_final: str,
) -> dict[str, Any]:
    """Return, on rank 0, the facts of the check of ``final`` and of each export."""
    os.chdir(folder)
    with rank_zero_first(world):
        if world.is_first:
            tiny_models.make_architecture(Path(kind), kind)
            tiny_models.make_images(Path("pics"))
            Path("masked_rows.py").write_text(MASKED)
            Path("a.txt").write_text("\n".join(tiny_models.LINES))
    flags = [Flag(flag="--set", path=path, text=text) for path, text in settings.items()]
    resolved = resolve_settings(flags=flags)
    run = RunFolder(Path("run").absolute())
    with rank_zero_first(world):
        if world.is_first:
            run.path.mkdir()
            run.config.write_text(settings_yaml(resolved))
    facts: dict[str, Any] = {}

    def check(request: ExportRequest, *, limit_s: float) -> ExportResult:
        if fresh:
            result = run_exporter(request, limit_s=limit_s)
        else:
            result = exported.check(Path(request.folder), request)
        facts["final"] = result
        return result

    def compare(folder: Path, hashes: Mapping[str, str]) -> int:
        _damage(folder, damage_final)
        return compare_hashes(folder, hashes)

    with (
        mock.patch.object(training, "run_exporter", check),
        mock.patch.object(training, "compare_hashes", compare),
    ):
        try:
            training.train_from_settings(resolved.settings, world, run.path)
        except MusterError as error:
            facts["error"] = str(error)
    if world.is_first:
        for name, how in exports.items():
            facts[name] = _export(run, Path(name).absolute(), **how)
    return facts if world.is_first else {}


def _export(
    run: RunFolder,
    folder: Path,
    *,
    damage: str = "",
    most_in_a_file_bytes: int = 10**9,
    **how: Any,
) -> Any:
    store = FolderStore(run.checkpoints)
    manifest = committed_manifests(store)[0]
    request = ExportRequest(
        checkpoint=str(run.checkpoints / manifest.name),
        folder=str(folder),
        beside=str(run.model),
        **how,
    )

    def finish(unfinished: Path) -> ExportResult:
        _damage(unfinished, damage)
        return exported.check(unfinished, request)

    try:
        return exported.export_weights(
            request, finish=finish, most_in_a_file_bytes=most_in_a_file_bytes
        )
    except MusterError as error:
        return f"{error.what}\n{error.why}"


def _damage(folder: Path, how: str) -> None:
    """Change one weight, ``"tensor NAME"``, or one value of the config, ``"config KEY VALUE"``."""
    if how.startswith("tensor"):
        name = how.split()[1]
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        tensors[name].view(-1)[0] += 1e-3 * torch.ones(())
        save_file(tensors, file, metadata={"format": "pt"})
    elif how:
        _, key, value = how.split()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: json.loads(value)}))
