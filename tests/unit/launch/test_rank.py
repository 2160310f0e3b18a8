"""The file that runs first in every rank: the script then finds everything as under plain Python."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import GIVE_UP_S
from torchmuster.launch.rank import start


@dataclass(frozen=True)
class Ran:
    """What a script did as rank 3 of 4, and under plain Python."""

    code: int
    log: str
    error: dict[str, str]
    plain_code: int
    plain: str


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script as a rank and by itself, in a folder of its own."""

    def both(
        script: str, *words: str, name: str = "train.py", module: bool = False, world_size: int = 4
    ) -> Ran:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(script))
        command = [name.removesuffix(".py").replace("/", ".") if module else name, *words]
        settings = {
            "records": str(tmp_path),
            "world_size": 4,
            "first_step": 0,
            "module": module,
            "parent": os.getpid(),
        }
        env = {**os.environ, "RANK": "3", "WORLD_SIZE": str(world_size)}
        quiet = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "timeout": GIVE_UP_S}
        done = subprocess.run(
            [sys.executable, "-u", start.__file__, json.dumps(settings), *command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **quiet,  # type: ignore[call-overload]
        )
        plain = subprocess.run(
            [sys.executable, "-u", *(["-m"] if module else []), *command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **quiet,  # type: ignore[call-overload]
        )
        record = tmp_path / "rank-3.error.json"
        return Ran(
            code=done.returncode,
            log=done.stdout,
            error=json.loads(record.read_text()) if record.exists() else {},
            plain_code=plain.returncode,
            plain=plain.stdout,
        )

    return both


def test_a_script_sees_what_it_would_see_by_itself(run: Run, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text("VALUE = 7\n")
    ran = run(
        """
        import argparse, os, sys
        import beside
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        print(parser.prog, parser.parse_args(), sys.argv, beside.VALUE)
        print(__name__, __file__, __spec__, __package__, __doc__, __builtins__.__name__)
        print(sys.path[0], os.path.realpath(sys.path[0]), os.getcwd())
        print(sorted(name for name in globals() if not name.startswith("_")))
        print(sys.modules["__main__"].__dict__ is globals(), repr(sys.stdin.read()))
        """,
        "--lr",
        "1e-4",
        name="code/train.py",
    )
    assert (ran.code, ran.error) == (0, {})
    assert ran.log == ran.plain
    assert "train.py Namespace(lr=0.0001)" in ran.log


def test_what_is_pickled_from_main_comes_back(run: Run) -> None:
    ran = run(
        """
        import dataclasses, multiprocessing, pickle, threading
        @dataclasses.dataclass
        class Batch:
            number: int
        def double(batch):
            return Batch(batch.number * 2)
        def later():
            import time; time.sleep(0.3); print("a thread outlives the main program", Batch(1))
        if __name__ == "__main__":
            print(pickle.loads(pickle.dumps(Batch(3))) == Batch(3))
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(double, [Batch(1), Batch(2)]))
            threading.Thread(target=later).start()
        """
    )
    assert ran.code == 0, ran.log
    assert "spawn [Batch(number=2), Batch(number=4)]" in ran.log
    assert ran.log == ran.plain


def test_a_module_runs_as_with_python_m(run: Run, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "beside.py").write_text("VALUE = 7\n")
    ran = run(
        """
        import sys
        from .beside import VALUE
        print(VALUE, __name__, __package__, __spec__.name, sys.argv, sys.path[0])
        """,
        "--lr",
        "1",
        name="package/train.py",
        module=True,
    )
    assert ran.code == 0, ran.log
    assert ran.log == ran.plain


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("sys.exit()", 0, None),
        ("sys.exit(0)", 0, None),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("raise SystemExit(True)", 1, ""),
        ("os._exit(5)", 5, None),
    ],
)
def test_every_way_a_script_ends_itself(
    run: Run, ending: str, code: int, error: str | None
) -> None:
    ran = run(f"import os, sys\nprint('working')\n{ending}\n")
    assert (ran.code, ran.log) == (ran.plain_code, ran.plain)
    assert ran.code == code
    assert ran.error.get("error") == error


@pytest.mark.parametrize("ending", ["raise", "sys.exit(str(error))"])
def test_an_error_in_three_parts_is_written_down_in_three_parts(run: Run, ending: str) -> None:
    ran = run(
        f"""
        import sys
        from torchmuster.errors import Impossible
        try:
            raise Impossible("asked for 8", why="there are 2", fix="ask for 2")
        except Impossible as error:
            {ending}
        """
    )
    assert [ran.error[part] for part in ("what", "why", "fix")] == [
        "asked for 8",
        "there are 2",
        "ask for 2",
    ]


def test_an_exception_is_shown_as_python_shows_it_and_written_down(run: Run) -> None:
    ran = run(
        """
        def train():
            try:
                {}["loss"]
            except KeyError as error:
                raise ValueError("no loss\\nin two lines") from error
        train()
        """
    )
    assert ran.code == ran.plain_code == 1
    assert ran.log == ran.plain
    assert "rank.py" not in ran.log
    assert ran.error["error"] == "ValueError: no loss\nin two lines"
    assert ran.error["traceback"] == ran.log
    assert "the direct cause of" in ran.log


def test_an_exception_hook_of_the_script_s_own_is_called_once(run: Run) -> None:
    ran = run(
        """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error)
        raise RuntimeError("tracked elsewhere")
        """
    )
    assert (ran.code, ran.log) == (ran.plain_code, ran.plain) == (1, ran.plain)
    assert ran.error["error"] == "RuntimeError: tracked elsewhere"


def test_what_is_registered_for_the_end_runs(run: Run) -> None:
    ran = run("import atexit\natexit.register(print, 'closed')\nraise RuntimeError('x')\n")
    assert ran.log == ran.plain
    assert ran.log.endswith("closed\n")


def test_a_syntax_error_names_the_line(run: Run) -> None:
    ran = run("print('a')\nif True\n    pass\n")
    assert ran.code == 1
    assert ran.error["error"].endswith("SyntaxError: expected ':'")
    assert ran.log == ran.plain
    assert 'train.py", line 2' in ran.log


def test_a_crash_in_native_code_leaves_its_stack_in_the_log(run: Run) -> None:
    ran = run("import ctypes\nctypes.string_at(0)\n")
    assert ran.code == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ran.log
    assert 'train.py", line 2' in ran.log
    assert ran.error == {}


def test_letters_of_any_kind_arrive_whatever_the_locale(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    ran = run("print('Zoë 🚀')\nraise ValueError('é')\n")
    assert ran.log == ran.plain
    assert ran.error["error"] == "ValueError: é"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the node agent ends what is left")
def test_it_dies_with_whoever_started_it(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import subprocess, sys
        code = "import os, time; from torchmuster.launch.rank.start import die_with\\n"
        code += "die_with(os.getppid()); print(flush=True); time.sleep(600)"
        subprocess.run([sys.executable, "-c", code])
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.kill()
        # The pipe's last holder is the child: its end is the end of what can be read.
        assert parent.stdout.read() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the node agent ends what is left")
def test_it_ends_if_its_parent_has_gone_already() -> None:
    code = "from torchmuster.launch.rank.start import die_with\ndie_with(1)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 137


def test_an_error_keeps_its_time_another_one_has_its_own_and_a_handled_one_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0.error.json"
    monkeypatch.setattr(start, "_error_file", path)
    monkeypatch.setattr(start, "_rank_pid", os.getpid())
    times = itertools.count(10.0)
    monkeypatch.setattr(start, "time", SimpleNamespace(time=lambda: next(times)))
    first = ValueError("first")
    for _ in range(2):
        start.record_error(first)
        assert json.loads(path.read_text())["at_unix_s"] == 10.0
    start.record_error(ValueError("another"))
    assert json.loads(path.read_text())["at_unix_s"] > 10.0
    start.forget_error()
    assert not path.exists()
    monkeypatch.setattr(start, "_rank_pid", os.getpid() + 1)  # in a forked child
    start.record_error(first)
    assert not path.exists()
