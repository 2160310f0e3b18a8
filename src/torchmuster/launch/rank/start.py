"""Entry point of each rank process; runs the user's script as ``python script.py`` would.

Run by its path, with settings as JSON and then the command. It uses only the standard library, so that
failures are reported whatever is installed on the host. It

- is killed when its parent, the node agent, exits,
- writes a record of an uncaught exception for the node agent,
- sends the node agent a heartbeat every second,
- records the steps, losses and checkpoints of a script that is not torchmuster's own.
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
# Where this rank's error is recorded (None: this process is not a rank of muster run), and when it occurred.
_error_file: Path | None = None
_rank_pid = 0
# The attribute of an error that says when it was recorded. A reference to the error would keep its frames, and so the
# tensors in them, alive.
_RECORDED = "_torchmuster_recorded"


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` exits (Linux; elsewhere the supervisor cleans up)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it exited before the call
            os._exit(137)


def main() -> None:
    """Run the user's script as one rank."""
    global _error_file, _rank_pid
    settings = json.loads(sys.argv[1])
    command = sys.argv[2:]
    die_with(settings["parent"])
    rank = int(os.environ["RANK"])
    records = Path(settings["records"])
    _error_file, _rank_pid = records / f"rank-{rank}.error.json", os.getpid()
    # This file runs by its path; who imports it in this process gets this module, which knows the rank.
    sys.modules.setdefault("torchmuster.launch.rank.start", sys.modules[__name__])
    faulthandler.enable()
    atexit.register(_leave_group)
    _begin_heartbeat(rank, records)
    if not (settings["module"] and command[0].startswith("torchmuster.")):
        _begin_recording(rank, records, settings["world_size"], settings["first_step"])
    try:
        run_command(command, module=settings["module"])
    except BaseException as error:
        error.__traceback__ = _without_this_file(error.__traceback__)
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _finished(rank, records)
        else:
            record_error(error)
        if not isinstance(error, Exception):  # SystemExit, KeyboardInterrupt: Python handles them
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    _finished(rank, records)


def record_error(error: BaseException) -> None:
    """Record this rank's error for the node agent; does nothing if this process is not a rank of ``muster run``.

    Called where an error is first seen, as what follows may not return or may abort the process. A later call
    about the same error replaces the record, but not its time.
    """
    if _error_file is None or os.getpid() != _rank_pid:  # a forked child has its own errors
        return
    at_unix_s = getattr(error, _RECORDED, time.time())
    with contextlib.suppress(Exception):  # a class may forbid it
        setattr(error, _RECORDED, at_unix_s)
    write_record(_error_file, {**_describe(error), "at_unix_s": at_unix_s})


def forget_error() -> None:
    """Delete the record of an error that the script has handled."""
    if _error_file is not None and os.getpid() == _rank_pid:
        _error_file.unlink(missing_ok=True)


def _leave_group() -> None:
    """Destroy a gloo group that the script left open; the script has finished by now.

    Its threads would outlive Python, and sometimes abort the process after a successful run.
    """
    distributed = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        if distributed.is_initialized() and distributed.get_backend() == "gloo":  # type: ignore[union-attr]
            distributed.destroy_process_group()  # type: ignore[union-attr]


def _finished(rank: int, records: Path) -> None:
    """Record that the script finished; other ranks may still need it."""
    forget_error()
    write_record(records / f"rank-{rank}.finished.json", {"at_unix_s": time.time()})


def _begin_heartbeat(rank: int, records: Path) -> None:
    try:
        from torchmuster.launch.rank import heartbeat
    except ImportError:  # this Python has only the script's packages: no heartbeat
        return
    heartbeat.start_heartbeat(rank, records)


def _begin_recording(rank: int, records: Path, world_size: int, first_step: int) -> None:
    if os.environ.get("TORCHMUSTER_RECORD") == "0":
        return
    with contextlib.suppress(Exception):  # a script runs without its curves rather than not at all
        from torchmuster.integrations.libraries import record_script

        recorder = record_script(rank, records, world_size)
        recorder.resume_at(first_step)
        atexit.register(recorder.end)


def run_command(command: list[str], *, module: bool) -> None:
    """Run a script or module in this process, as Python would run it with these arguments."""
    sys.argv = command
    if module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    script = str(Path.cwd() / command[0])  # as in Python's __file__ and tracebacks
    sys.path[0] = str(Path(script).resolve().parent)
    # As Python does for ``python script.py``, so that pickling, multiprocessing and threads
    # find the script's names in __main__.
    space = types.ModuleType("__main__")
    space.__file__ = script
    space.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    space.__dict__["__builtins__"] = __builtins__
    space.__dict__["__cached__"] = None
    sys.modules["__main__"] = space
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    exec(code, space.__dict__)  # noqa: S102  # the user's script


def _without_this_file(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that belongs to the script."""
    hidden = {__file__, runpy.__file__, "<frozen runpy>"}
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in hidden:
        first = first.tb_next
    return first


def _describe(error: BaseException) -> dict[str, object]:
    if not isinstance(error, SystemExit):
        return {
            "error": "".join(traceback.format_exception_only(error)).strip()[-4000:],
            "traceback": "".join(traceback.format_exception(error))[-16000:],
            **_what_why_fix(error),
        }
    record: dict[str, object] = {"error": str(error.code), "traceback": "", "exit_code": 1}
    if isinstance(error.code, int):
        record |= {"error": "", "exit_code": int(error.code)}
    handled = error.__context__
    if handled is not None and str(handled) == error.code:  # sys.exit(str(error)) in an except
        record |= _what_why_fix(handled)
    else:
        record |= _what_why_fix(error)
    return record


def _what_why_fix(error: BaseException) -> dict[str, str]:
    """Return what, why and fix of an error that has them.

    That is a ``MusterError``; it is recognized by its attributes, as only the standard library is imported.
    """
    texts = {}
    for name in ("what", "why", "fix"):
        text = getattr(error, name, None)
        if not isinstance(text, str):
            return {}
        texts[name] = text[:4000]
    return texts if texts["what"] else {}


def write_record(path: Path, content: dict[str, object]) -> None:
    """Write a record atomically; write errors are printed."""
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:  # a full disk must not hide the script's own failure
        print(f"torchmuster: could not write {path}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
