"""The base model of a checkpoint that holds only trained weights: its name and the hash of its files.

Frozen weights of a model that was loaded from files are not saved. On resume they are loaded from
the files again, and the hash shows whether these are the same files.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmuster.errors import Impossible
from torchmuster.redaction import harmless

_READ_BYTES = (
    2**20
)  # of each file: its header has every name and shape, and the first tensors follow
_SHOWN_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A base model, as a checkpoint's state names it."""

    name: str  # a name on the hub, or an absolute path
    revision: str | None
    dtype: str  # that its weights are loaded in; nf4: in 4 bits
    sha256: str  # of its weight files: see hash_weights

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self)


def hash_weights(weights: Sequence[Path]) -> str:
    """Return the SHA-256 of the names, the sizes and the first MiB of weight files.

    Another model, revision or fine-tuned copy differs there; whole files of an 8B model would take
    10 s at every start.
    """
    digest = hashlib.sha256()
    for path in sorted(weights):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_READ_BYTES))
    return digest.hexdigest()


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
    own = "no base model that was loaded from files"
    if here is not None:
        own = _text(here)
    raise Impossible(
        f"the checkpoint {checkpoint} belongs to another base model",
        why=f"it was saved with {_text(saved)}; this run has {own}",
        fix="set model.model_name_or_path to the model that the run began with; if its files were "
        "replaced, restore them, or start a new run",
    )


def _text(base: Mapping[str, Any]) -> str:
    revision = f", revision {base['revision']}" if base["revision"] else ""
    return harmless(f"{base['name']}{revision}, SHA-256 {base['sha256'][:_SHOWN_DIGITS]}…")
