"""Attack the commands as a stranger, another user or a broken disk would, and print a table of what happened.

    python benchmarks/abuse.py                        all attacks; exit code 1 if one succeeds
    python benchmarks/abuse.py --runs 10 --clients 100

Each row is a real process or service of this checkout. "Honest client" is a client that asks as intended during the attack; it must be
answered within 2 s. The tests of single attacks are listed in docs/dev/threat-model.md.
"""

import argparse
import asyncio
import contextlib
import http.client
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE / "tests"), str(HERE / "tests" / "unit" / "launch" / "join")]
sys.path.insert(0, str(HERE / "tests" / "unit" / "cli"))

ANSWERED_WITHIN_S = 2.0
MOST_BYTES = 400 * 2**20
SCRIPT = "import os, time\nprint('rank', os.environ['RANK'])\ntime.sleep(2)\n"


def muster(*words: str) -> list[str]:
    """Return the command line of this checkout."""
    return [sys.executable, "-m", "torchmuster", *words]


@contextlib.contextmanager
def served(words: list[str], where: Path) -> Iterator[int]:
    """Start a command that serves; yield its port."""
    log = where / f"{words[0]}.log"
    with log.open("w") as stream:
        child = subprocess.Popen(muster(*words), cwd=where, stdout=stream, stderr=stream)
    try:
        deadline_s = time.monotonic() + 120
        while "127.0.0.1:" not in (text := log.read_text()):
            if time.monotonic() > deadline_s or child.poll() is not None:
                raise RuntimeError(f"{words[0]} does not serve: {text}")
            time.sleep(0.1)
        yield int(text.partition("127.0.0.1:")[2].split("/")[0])
    finally:
        child.terminate()
        child.wait()


@contextlib.contextmanager
def slow_clients(port: int, count: int) -> Iterator[None]:
    """Open connections that send the beginning of a request, and no more."""
    with contextlib.ExitStack() as stack:
        for place in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                client.sendall((b"", b"G", b"GET / HTTP/1.1\r\nX: ")[place % 3])
        yield


def honest_s(port: int, path: str) -> float:
    """Return the longest time of three requests."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        if status != 200:
            raise RuntimeError(f"status {status}")
        took.append(time.monotonic() - began)
    return max(took)


def in_time(took_s: float) -> str:
    """Return the result of an honest client; raise if it waited too long."""
    text = f"honest client answered in {took_s:.2f} s"
    if took_s > ANSWERED_WITHIN_S:
        raise RuntimeError(text)
    return text


def attack_exporter(where: Path, options: argparse.Namespace) -> str:
    """Occupy the exporter."""
    with served(["exporter", "--port", "0"], where) as port, slow_clients(port, options.clients):
        return in_time(honest_s(port, "/metrics"))


def attack_live_page(where: Path, options: argparse.Namespace) -> str:
    """Occupy the live page."""
    import test_hostile_runs

    run = test_hostile_runs.a_good_run(where / "runs", "watched")
    words = ["watch", str(run.path), "--browser"]
    with served(words, where) as port, slow_clients(port, options.clients):
        return in_time(honest_s(port, "/"))


def attack_join(where: Path, options: argparse.Namespace) -> str:
    """Occupy the listener of a host that waits for machines."""
    from open_host import join, open_host

    async def attacked() -> float:
        async with open_host() as host:
            code = host.service.codes()[1]
            with contextlib.ExitStack() as stack:
                for _ in range(options.clients):
                    client = stack.enter_context(socket.socket())
                    client.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        client.connect(("127.0.0.1", code.port))
                await asyncio.sleep(0.5)
                began = time.monotonic()
                channel = await join(code)
                took_s = time.monotonic() - began
                await channel.close()
                return took_s

    return in_time(asyncio.run(attacked()))


def attack_runs(where: Path, options: argparse.Namespace) -> str:
    """Put hostile files next to a good run; every command must show the good one in bounded memory."""
    import test_hostile_runs as hostile

    root = where / "hostile" / "runs"
    for kind, write in hostile.HOSTILE.items():
        for file in hostile.FILES:
            run = hostile.a_good_run(root, f"{kind}-{Path(file).stem}")
            path = run.path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
    hostile.a_good_run(root)
    commands = (
        ["runs", "--all"],
        ["explain", "good"],
        ["watch", "good", "--once"],
        ["exporter", "--once"],
    )
    for words in commands:
        done = subprocess.run(
            muster(*words),
            cwd=root.parent,
            capture_output=True,
            text=True,
            timeout=300,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES)),
        )
        if done.returncode or "good" not in done.stdout:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr[-200:]}")
    count = len(hostile.HOSTILE) * len(hostile.FILES)
    return f"{count} hostile files; {len(commands)} commands show the good run within {MOST_BYTES >> 20} MiB"


def many_runs(where: Path, options: argparse.Namespace) -> str:
    """Start many runs at the same time."""
    folder = where / "many"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    words = ["run", "--device", "cpu", "--ranks", "1", "script.py"]
    began = time.monotonic()
    logs = [folder / f"{place}.log" for place in range(options.runs)]
    with contextlib.ExitStack() as stack:
        children = [
            subprocess.Popen(
                muster(*words),
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context(log.open("w")),
            )
            for log in logs
        ]
        codes = [child.wait() for child in children]
    failed = [log.read_text() for log, code in zip(logs, codes, strict=True) if code != 0]
    if failed:
        shown = " / ".join(failed[0].splitlines()[-4:])
        raise RuntimeError(f"{len(failed)} of {options.runs} runs failed: {shown}")
    return f"{options.runs} runs at the same time, all finished, {time.monotonic() - began:.0f} s"


ATTACKS: dict[str, Callable[[Path, argparse.Namespace], str]] = {
    "slow clients of the exporter": attack_exporter,
    "slow clients of the live page": attack_live_page,
    "slow clients of the join listener": attack_join,
    "hostile run folders": attack_runs,
    "many runs at the same time": many_runs,
}


def main() -> int:
    """Run the attacks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--only", help="a part of an attack's name")
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n| attack | result | |\n|---|---|---|"
    )
    good = True
    for name, attack in ATTACKS.items():
        if options.only and options.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="abuse-") as folder:
            try:
                result, passed = attack(Path(folder), options), True
            except Exception as error:
                result, passed = f"{type(error).__name__}: {error}", False
        good = good and passed
        print(f"| {name} | {result} | {'pass' if passed else 'FAIL'} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
