"""Cache trace records on disk, keyed by everything that they depend on."""

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

import torchmuster
from torchmuster import untrusted
from torchmuster.plan.job import Work
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.runfolder import user_cache, write_atomically
from torchmuster.units import GiB

# Packages that determine, besides the request, the operations of a training.
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchmuster")
_MOST_FILES = 2000  # of a package: a folder with more is not a model's
MOST_BYTES = GiB  # of cached records


_MOST_RECORD_BYTES = 64 * 2**20
_decode_record = msgspec.json.Decoder(TraceRecord).decode


class TraceCache:
    """Cache records in a folder; damaged or outdated entries are ignored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "traces"
        self._contents: dict[Work, bytes] = {}

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
        entries = [(path, path.stat()) for path in self.folder.glob("*")]
        entries.sort(key=lambda entry: entry[1].st_mtime_ns)
        too_much = sum(status.st_size for _, status in entries) - MOST_BYTES
        for path, status in entries:
            if too_much <= 0:
                return
            path.unlink(missing_ok=True)
            too_much -= status.st_size

    def _path(self, request: TraceRequest) -> Path:
        if request.work not in self._contents:
            self._contents[request.work] = contents_of(request.work)
        digest = hashlib.blake2b(msgspec.json.encode(request), digest_size=16)
        digest.update(versions())
        digest.update(self._contents[request.work])
        return self.folder / f"{digest.hexdigest()}.json"


@cache
def versions() -> bytes:
    """Return the package versions and a digest of the tracing code."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    own = Path(torchmuster.__file__).parent
    files = [*(own / "plan").rglob("*.py"), *(own / "train").rglob("*.py")]
    times = sorted(f"{path}{path.stat().st_mtime_ns}" for path in files)
    return "\n".join([*found, *times]).encode()


def contents_of(work: Work) -> bytes:
    """Return a digest of the files that define the training: configurations and Python code."""
    digest = hashlib.blake2b(digest_size=16)
    folder = Path(work.folder)
    paths: list[Path] = []
    if work.model_name_or_path is not None:
        paths.append(folder / Path(work.model_name_or_path).expanduser() / "config.json")
        paths += _hub_configurations(work.model_name_or_path)
    for name in (work.build, work.dataset, work.loss, work.optimizer):
        if name is not None and ":" in name:
            paths += _code_of(name.partition(":")[0], folder)
    for path in paths:
        with suppress(OSError):
            digest.update(path.read_bytes())
            digest.update(str(path).encode())
    return digest.digest()


def _hub_configurations(name: str) -> list[Path]:
    """Return the files that determine a model of the hub, as far as the hub's cache has them.

    The path of a snapshot contains its revision; ``refs`` names the revision that is used.
    """
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache_of_hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = cache_of_hub / f"models--{name.replace('/', '--')}"
    return sorted([*repository.glob("refs/*"), *repository.glob("snapshots/*/config.json")])


def _code_of(module: str, folder: Path) -> Iterator[Path]:
    """Yield the Python files of a module's package, or those next to a single file."""
    top = module.partition(".")[0]
    package, single = folder / top, folder / f"{top}.py"
    if package.is_dir():
        yield from sorted(package.rglob("*.py"))[:_MOST_FILES]
    elif single.is_file():
        yield from sorted(folder.glob("*.py"))[:_MOST_FILES]
    else:
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(top)
            if spec is not None and spec.origin is not None:
                origin = Path(spec.origin)
                files = origin.parent.rglob("*.py") if origin.stem == "__init__" else [origin]
                yield from sorted(files)[:_MOST_FILES]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder of plans."""
    return user_cache("plan", environment)
