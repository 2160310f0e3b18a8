"""Cache trace records on disk, keyed by everything that they depend on."""

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

import msgspec

import torchmuster
from torchmuster import untrusted
from torchmuster.plan.job import Work
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.runfolder import user_cache, write_atomically
from torchmuster.units import GiB, MiB

# Packages that determine, besides the request, the operations of a training.
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchmuster")
_MOST_FILES = 2000  # of a package: a folder with more is not a model's
MOST_BYTES = GiB  # of cached records
_MOST_RECORD_BYTES = 64 * MiB
_decode_record = msgspec.json.Decoder(TraceRecord).decode


class TraceCache:
    """Cache records in a folder; damaged or outdated entries are ignored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "traces"
        self._contents_of = lru_cache(contents_of)  # files are read once per plan

    def get(self, request: TraceRequest) -> TraceRecord | None:
        """Return the cached record for this request; None if missing."""
        try:
            record = untrusted.read_typed(self._path(request), _decode_record, _MOST_RECORD_BYTES)
        except (OSError, untrusted.Unreadable):
            return None
        return record if record.request == request else None

    def put(self, record: TraceRecord) -> None:
        """Store a record atomically; a failed write to the disk is not an error."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = msgspec.json.encode(record).decode()
            write_atomically(self._path(record.request), text, durable=False)

    def forget_oldest(self) -> None:
        """Delete the oldest entries until the total size is within the limit."""
        with suppress(OSError):  # another plan may be deleting the same files
            entries = sorted(self.folder.glob("*"), key=lambda path: path.stat().st_mtime_ns)
            total = sum(path.stat().st_size for path in entries)
            while total > MOST_BYTES:
                oldest = entries.pop(0)
                total -= oldest.stat().st_size
                oldest.unlink()

    def _path(self, request: TraceRequest) -> Path:
        digest = hashlib.blake2b(msgspec.json.encode(request), digest_size=16)
        digest.update(versions())
        digest.update(self._contents_of(request.work))
        return self.folder / f"{digest.hexdigest()}.json"


@cache
def versions() -> bytes:
    """Return the package versions and the times of the tracing code."""
    lines = []
    for name in _PACKAGES:
        version = "none"
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
        lines.append(f"{name} {version}")
    own = Path(torchmuster.__file__).parent
    for path in sorted([*(own / "plan").rglob("*.py"), *(own / "train").rglob("*.py")]):
        lines.append(f"{path} {path.stat().st_mtime_ns}")
    return "\n".join(lines).encode()


def contents_of(work: Work) -> bytes:
    """Return a digest of the files that define the training: configurations and Python code."""
    digest = hashlib.blake2b(digest_size=16)
    for path in _files_of(work):
        with suppress(OSError):
            digest.update(path.read_bytes())
            digest.update(str(path).encode())
    return digest.digest()


def _files_of(work: Work) -> Iterator[Path]:
    folder, name = Path(work.folder), work.model_name_or_path
    if name is not None:
        yield folder / Path(name).expanduser() / "config.json"
        # Of a model of the hub: the path of a snapshot contains its revision, which refs names.
        home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        repository = hub / f"models--{name.replace('/', '--')}"
        yield from sorted([*repository.glob("refs/*"), *repository.glob("snapshots/*/config.json")])
    for function in (work.build, work.dataset, work.loss, work.optimizer):
        if function is not None and ":" in function:
            yield from sorted(_code_of(function.partition(":")[0], folder))[:_MOST_FILES]


def _code_of(module: str, folder: Path) -> list[Path]:
    """Return the Python files of a module's package, or those next to a single file."""
    top = module.partition(".")[0]
    if (folder / top).is_dir():
        return list((folder / top).rglob("*.py"))
    if (folder / f"{top}.py").is_file():
        return list(folder.glob("*.py"))
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
        if spec is not None and spec.submodule_search_locations:
            return list(Path(spec.submodule_search_locations[0]).rglob("*.py"))
        if spec is not None and spec.origin is not None:
            return [Path(spec.origin)]
    return []


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder of plans."""
    return user_cache("plan", environment)
