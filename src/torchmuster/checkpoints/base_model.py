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

_PIECE_BYTES = 4 * 2**20
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
    states = {one: _state_of(one) for one in weights}
    new = [one for one in weights if known.get(str(one), {}).get("state") != states[one]]
    if new:
        before(sum(one.stat().st_size for one in new))
        with ThreadPoolExecutor(min(len(new), os.cpu_count() or 1)) as pool:
            for one, digest in zip(new, pool.map(_sha256, new), strict=True):
                known[str(one)] = {"state": states[one], "sha256": digest}
        if cache is not None:
            kept = {str(one): known[str(one)] for one in weights}
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cache, json.dumps(kept, indent=1) + "\n")
    together = [f"{one.name} {known[str(one)]['sha256']}\n" for one in sorted(weights)]
    return hashlib.sha256("".join(together).encode()).hexdigest()


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
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _state_of(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _read_cache(cache: Path | None) -> dict[str, Any]:
    content = untrusted.read_json_object(cache) if cache is not None else {}
    return content if _is_cache(content) else {}


def _is_cache(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(one, dict) and isinstance(one.get("sha256"), str) for one in content.values()
    )
