"""The base model of a checkpoint that holds only trained weights: its name and the hash of its files.

Frozen weights of a model that was loaded from files are not saved. On resume they are loaded from
the files again, and the hash shows whether these are the same files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmuster import untrusted
from torchmuster.errors import Impossible
from torchmuster.redaction import harmless
from torchmuster.runfolder import write_atomically

_SHOWN_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A base model, as a checkpoint's state names it."""

    name: str  # a name on the hub, or an absolute path
    revision: str | None
    dtype: str  # that its weights are loaded in; nf4: in 4 bits
    sha256: str  # of the names and contents of its weight files

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self)


def hash_weights(
    weights: Sequence[Path],
    *,
    cache: Path | None = None,
    before: Callable[[int], None] = lambda size_bytes: None,
) -> str:
    """Return the SHA-256 of the names and contents of weight files.

    ``cache`` is a file that keeps the hash of each file, with its size and time of change: an
    unchanged file is read only once. ``before`` is called with the number of bytes to read.
    """
    known = _read_cache(cache)
    states = {path: _state_of(path) for path in weights}
    changed = [path for path in weights if known.get(str(path), {}).get("state") != states[path]]
    if changed:
        before(sum(path.stat().st_size for path in changed))
        with ThreadPoolExecutor(min(len(changed), os.cpu_count() or 1)) as pool:
            for path, digest in zip(changed, pool.map(_sha256, changed), strict=True):
                known[str(path)] = {"state": states[path], "sha256": digest}
        if cache is not None:
            current = {str(path): known[str(path)] for path in weights}
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cache, json.dumps(current, indent=1) + "\n")
    lines = [f"{path.name} {known[str(path)]['sha256']}\n" for path in sorted(weights)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def refuse_other_base(checkpoint: str, saved: Any, here: Any) -> None:
    """Raise if a checkpoint needs another base model than this run's; both are JSON types."""
    if saved is None:
        return
    is_same = here is not None and saved["sha256"] == here["sha256"]
    if is_same and saved["dtype"] == here["dtype"]:
        return
    if is_same:
        raise Impossible(
            f"the checkpoint {checkpoint} was saved with a base model in {saved['dtype']}",
            why=f"this run loads the same files in {here['dtype']}, so its frozen weights differ",
            fix="use the model.torch_dtype and model.load_in_4bit that the run began with",
        )
    raise Impossible(
        f"the checkpoint {checkpoint} belongs to another base model",
        why=f"it was saved with {_text(saved)}; this run has "
        + ("no base model that was loaded from files" if here is None else _text(here)),
        fix="set model.model_name_or_path to the model that the run began with; if its files were "
        "replaced, restore them, or start a new run",
    )


def _text(base: Mapping[str, Any]) -> str:
    revision = f", revision {base['revision']}" if base["revision"] else ""
    return harmless(f"{base['name']}{revision}, SHA-256 {base['sha256'][:_SHOWN_DIGITS]}…")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _state_of(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read_cache(cache: Path | None) -> dict[str, Any]:
    """Return the hashes of earlier calls by path; {} if there are none that can be read."""
    if cache is None:
        return {}
    entries = untrusted.read_json_object(cache)
    for entry in entries.values():
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            return {}
    return entries
