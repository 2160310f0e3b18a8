"""The first thing that runs in the process of each rank: then the user's script, as if by itself.

Run by its path, with settings as JSON and then the command, and only the standard library is used: what
is installed on the machine must not decide whether a failure can be reported. It

- dies when its parent (torchrun's agent) dies,
- writes everything the script prints to the rank's own log,
- leaves a record of its process, and of the exception that ends it, for the node agent,
- tells the node agent every second what it is doing,
- refuses to run in a group of another size than the one that was called together.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib.machinery
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere the node agent sweeps)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(137)


def main() -> None:
    """Take over the process for a rank."""
    settings = json.loads(sys.argv[1])
    command = sys.argv[2:]
    die_with_parent()
    rank = int(os.environ["RANK"])
    records = Path(settings["records"])
    write_record(records / f"rank-{rank}.json", {"pid": os.getpid(), "at_unix_s": time.time()})
    try:
        _write_to(Path(settings["logs"]) / f"rank-{rank}.log")
    except OSError as error:  # the node agent is told, as no log can say it
        error.__traceback__ = None
        write_record(records / f"rank-{rank}.error.json", _describe(error))
        raise
    faulthandler.enable()
    if int(os.environ["WORLD_SIZE"]) != settings["world_size"]:
        sys.exit(
            f"this rank was put into a group of {os.environ['WORLD_SIZE']} ranks, but "
            f"{settings['world_size']} were called together; it does not train alone"
        )
    atexit.register(_leave_group)
    _begin_heartbeat(rank, records)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(settings["attempt"])
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(settings["max_restarts"])
    try:
        _run_start(command, module=settings["module"])
    except BaseException as error:
        error.__traceback__ = _without_this_file(error.__traceback__)
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _finished(rank, records)
        else:
            write_record(records / f"rank-{rank}.error.json", _describe(error))
        if not isinstance(error, Exception):  # SystemExit, KeyboardInterrupt: Python knows how
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    _finished(rank, records)


def _leave_group() -> None:
    """Leave a group of gloo's that the script left open; everything of the script has ended by now.

    Its threads would outlive Python, and now and then abort the process after all went well.
    """
    distributed = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        if distributed.is_initialized() and distributed.get_backend() == "gloo":  # type: ignore[union-attr]
            distributed.destroy_process_group()  # type: ignore[union-attr]


def _finished(rank: int, records: Path) -> None:
    """Leave word that the script ended well; others may still have needed it."""
    write_record(records / f"rank-{rank}.finished.json", {"at_unix_s": time.time()})


def _write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _begin_heartbeat(rank: int, records: Path) -> None:
    try:
        from torchmuster.launch.rank import heartbeat
    except ImportError:  # this Python knows the script's packages only: then without
        return
    heartbeat.start_heartbeat(rank, records)


def _run_start(command: list[str], *, module: bool) -> None:
    sys.argv = command
    if module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    script = str(Path.cwd() / command[0])  # as Python has it in __file__ and in tracebacks
    sys.path[0] = str(Path(script).resolve().parent)
    # What Python itself does for ``python script.py``, so that pickling, multiprocessing and threads
    # find the script's names in __main__.
    space = types.ModuleType("__main__")
    space.__file__ = script
    space.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    space.__dict__["__builtins__"] = __builtins__
    space.__dict__["__cached__"] = None
    sys.modules["__main__"] = space
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    exec(code, space.__dict__)  # noqa: S102  # the script the user asked to run


def _without_this_file(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that is the script's own."""
    hidden = {__file__, runpy.__file__, "<frozen runpy>"}
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in hidden:
        first = first.tb_next
    return first


def _describe(error: BaseException) -> dict[str, object]:
    if isinstance(error, SystemExit):
        summary, trace = f"the script ended itself: {error.code}", ""
        own = error.__context__  # sys.exit(str(error)) in an except
        said = own if own is not None and str(own) == error.code else error
        parts: dict[str, object] = {**_start_parts(said)}
        if isinstance(error.code, int):
            parts["exit_code"] = error.code
    else:
        summary = "".join(traceback.format_exception_only(error)).strip()[-4000:]
        trace = "".join(traceback.format_exception(error))[-16000:]
        parts = {**_start_parts(error)}
    return {"error": summary, "traceback": trace, "at_unix_s": time.time(), **parts}


def _start_parts(error: BaseException) -> dict[str, str]:
    """Return what was asked, what is true and what to do, where an error says so in three parts.

    That is a ``MusterError``; it is known by its parts, as nothing but the standard library is imported.
    """
    parts = {name: getattr(error, name, None) for name in ("what", "why", "fix")}
    if all(isinstance(part, str) for part in parts.values()) and parts["what"]:
        return {name: str(part)[:4000] for name, part in parts.items()}
    return {}


def write_record(path: Path, content: dict[str, object]) -> None:
    """Write a record so that a reader sees all of it or nothing; what cannot be written is said."""
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:  # a full disk must not hide the script's own failure
        print(f"torchmuster: could not write {path}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
