"""Check before a start that files, folders and modules in the settings exist on this machine."""

import glob
import importlib.util
import os
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from torchmuster.config.image_folder import image_classes
from torchmuster.config.resolve import Resolved
from torchmuster.config.training import OWN_NAMES, functions_in
from torchmuster.errors import ConfigError, Impossible, Mistake
from torchmuster.redaction import redact_text

# The library that each of metrics.sinks needs; the extra has the sink's name.
SINK_LIBRARIES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
}

# The extra and the libraries that a setting needs; an extra includes those below it.
_SETTING_LIBRARIES = {
    "model.load_in_4bit": ("qlora", ("bitsandbytes", "peft", "transformers")),
    "model.lora": ("lora", ("peft", "transformers")),
    "model.model_name_or_path": ("transformers", ("transformers",)),
    "data.files": ("datasets", ("datasets",)),
    "data.hugging_face": ("datasets", ("datasets",)),
}


def check_here(resolved: Resolved) -> None:
    """Raise a :class:`ConfigError` with everything the settings name and this machine lacks.

    Imports nothing and uses no network: what needs either is checked by the ranks.
    """
    found = (
        *_files(resolved),
        *_images(resolved),
        *_model(resolved),
        *_modules(resolved),
        *_libraries(resolved),
        *_sinks(resolved),
    )
    if mistakes := list(found):
        raise ConfigError(mistakes)


def check_sinks(resolved: Resolved) -> None:
    """Raise a :class:`ConfigError` with everything that the sinks need and this machine lacks."""
    if mistakes := list(_sinks(resolved)):
        raise ConfigError(mistakes)


def missing_library(sink: str) -> str:
    """Return the command that installs a sink's library; "" if it is installed."""
    return "" if _is_installed(SINK_LIBRARIES[sink]) else f"pip install 'torchmuster[{sink}]'"


def _is_installed(library: str) -> bool:
    try:
        found = importlib.util.find_spec(library)
    except ValueError:
        found = None
    # A namespace package has no origin: W&B creates a folder named wandb in the working folder.
    return found is not None and bool(found.origin)


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be a path, not a name on the hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def matching_files(pattern: str) -> list[str]:
    """Return the files of a path, a pattern or a folder; a URL is returned as it is."""
    if "://" in pattern or "::" in pattern:  # not on this host
        return [pattern]
    path = Path(pattern).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        path = path / "*"
    names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # whole patterns, not below a folder
    files = [name for name in names if Path(name).is_file()]
    if not files:
        raise Impossible(
            f"{redact_text(pattern)!r} matches no file in {Path.cwd()}",
            fix="check the path or the pattern",
        )
    return files


def _files(resolved: Resolved) -> Iterator[Mistake]:
    data = resolved.settings.data
    if data.files is None:
        return
    for path, places in (("data.files", data.files), ("data.evaluation", data.evaluation)):
        for place in [places] if isinstance(places, str) else places or ():
            try:
                matching_files(place)
            except Impossible as error:
                where = resolved.sources[path].where
                yield Mistake(where=where, what=f"{path}: {error.what}", fix=error.fix)


def _images(resolved: Resolved) -> Iterator[Mistake]:
    data = resolved.settings.data
    if data.images is None:
        return
    for path, folder in (("data.images", data.images), ("data.evaluation", data.evaluation)):
        if folder is None:
            continue
        try:
            image_classes(str(folder))
        except Impossible as error:
            where = resolved.sources[path].where
            yield Mistake(where=where, what=f"{error.what}: {error.why}", fix=error.fix)


def _model(resolved: Resolved) -> Iterator[Mistake]:
    name = resolved.settings.model.model_name_or_path
    if name is not None and looks_like_path(name) and not Path(name).expanduser().is_dir():
        yield Mistake(
            where=resolved.sources["model.model_name_or_path"].where,
            what=f"model folder {name!r} not found; searched in {Path.cwd()}",
            fix="check the path; a name on the hub is written as owner/name",
        )


def _modules(resolved: Resolved) -> Iterator[Mistake]:
    values = resolved.values()
    for path in functions_in(resolved):
        name = values[path]
        if not isinstance(name, str) or name in OWN_NAMES.get(path, ()):
            continue
        module = name.partition(":")[0]
        if not _exists(module):
            yield Mistake(
                where=resolved.sources[path].where,
                what=f"{path} is {name!r}, but module {module!r} is neither in {Path.cwd()} nor "
                "installed",
                fix="run from the folder that contains it; write the module with dots, without .py",
            )


def _libraries(resolved: Resolved) -> Iterator[Mistake]:
    """Yield the first setting, if any, whose libraries are not installed."""
    values = resolved.values()
    for path, (extra, libraries) in _SETTING_LIBRARIES.items():
        missing = [library for library in libraries if not _is_installed(library)]
        if missing and values[path]:
            yield Mistake(
                where=resolved.sources[path].where,
                what=f"{path} needs packages that are not installed: {', '.join(missing)}",
                fix=f"pip install 'torchmuster[{extra}]'",
            )
            return


def _sinks(resolved: Resolved) -> Iterator[Mistake]:
    for sink in resolved.settings.metrics.sinks:
        if line := missing_library(sink):
            yield Mistake(
                where=resolved.sources["metrics.sinks"].where,
                what=f"metrics.sinks has {sink}, but {SINK_LIBRARIES[sink]} is not installed",
                fix=line,
            )
        elif sink == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            yield Mistake(
                where=resolved.sources["metrics.sinks"].where,
                what="metrics.sinks has mlflow, but no tracking URI is set",
                fix="export MLFLOW_TRACKING_URI=http://tracker:5000",
            )


def _exists(module: str) -> bool:
    """Return whether a module exists, without importing it; the working folder comes first."""
    top, *inner = module.split(".")
    importlib.invalidate_caches()
    if PathFinder.find_spec(top, [str(Path.cwd())]) is None:
        try:
            return importlib.util.find_spec(top) is not None
        except ValueError:  # already running, such as __main__
            return True
    place = Path.cwd().joinpath(top, *inner)
    return not inner or place.is_dir() or any(place.parent.glob(f"{place.name}.*"))
