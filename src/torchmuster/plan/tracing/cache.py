"""Cache trace records on disk, keyed by everything that they depend on."""

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
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
MOST_BYTES = 2 * GiB  # of cached records and logs


_MOST_RECORD_BYTES = 64 * 2**20
_decode_record = msgspec.json.Decoder(TraceRecord).decode


class TraceCache:
    """Cache records and their logs in a folder; damaged or outdated entries are ignored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "traces"
        self._contents: dict[Work, bytes] = {}

    def get(self, request: TraceRequest) -> TraceRecord | None:
        """Return the cached record for this request, with or without its log; None if missing."""
        try:
            record = untrusted.read_typed(self._path(request), _decode_record, _MOST_RECORD_BYTES)
        except (OSError, untrusted.Unreadable):
            return None
        if with_log(record.request) != with_log(request):
            return None
        if request.keep_log and (record.log is None or not Path(record.log).is_file()):
            return None
        return as_asked(request, record)

    def put(self, record: TraceRecord) -> TraceRecord:
        """Store a record with its log atomically; return it with the new path of the log.

        A failed write to the disk is not an error.
        """
        path = self._path(record.request)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if record.log is not None:
                # Named like its record: the same request may be for another model later.
                log = path.with_suffix(".jsonl")
                Path(record.log).replace(log)
                record = replace(record, log=str(log))
            write_atomically(path, msgspec.json.encode(record).decode(), durable=False)
        except OSError:
            pass
        return record

    def forget_oldest(self) -> None:
        """Delete the oldest entries until the total size is within the limit."""
        found = [(path, path.stat()) for path in self.folder.glob("*")]
        found.sort(key=lambda one: one[1].st_mtime_ns)
        too_much = sum(status.st_size for _, status in found) - MOST_BYTES
        for path, status in found:
            if too_much <= 0:
                return
            path.unlink(missing_ok=True)
            too_much -= status.st_size

    def _path(self, request: TraceRequest) -> Path:
        if request.work not in self._contents:
            self._contents[request.work] = contents_of(request.work)
        digest = hashlib.blake2b(msgspec.json.encode(with_log(request)), digest_size=16)
        digest.update(versions())
        digest.update(self._contents[request.work])
        return self.folder / f"{digest.hexdigest()}.json"


def with_log(request: TraceRequest) -> TraceRequest:
    """Return the same request with the allocation log, which changes nothing else in a trace."""
    return request if request.keep_log else replace(request, keep_log=True)


def as_asked(request: TraceRequest, record: TraceRecord) -> TraceRecord:
    """Return a record with a log as the answer to a request that may not want the log."""
    return record if request.keep_log else replace(record, request=request, log=None)


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
    """Return a digest of the files that define the model: its config.json, or its Python code."""
    digest = hashlib.blake2b(digest_size=16)
    folder = Path(work.folder)
    if work.model_name_or_path is not None:
        config = folder / Path(work.model_name_or_path).expanduser() / "config.json"
        with suppress(OSError):  # a name on the hub has no files here
            digest.update(config.read_bytes())
    for name in (work.build, work.dataset, work.loss):
        if name is not None and ":" in name:
            for path in _code_of(name.partition(":")[0], folder):
                with suppress(OSError):
                    digest.update(str(path).encode())
                    digest.update(path.read_bytes())
    return digest.digest()


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
