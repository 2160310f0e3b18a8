"""``muster bench ab`` runs both commands at the same time, ``--pairs`` times, and prints the comparison."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench.ab_run import AbCommand, parse_commands
from torchmuster.cli.main import main
from torchmuster.errors import ExitCode, Impossible

# A bench without torch: it takes its turns, and says that each sample took as long as its first word tells.
BENCH = """\
import dataclasses, os, sys
from pathlib import Path
from torchmuster.bench import environment, record
from torchmuster.bench.interleaved import Turns

took_s, samples, *_, place = sys.argv[1:]
if took_s == "broken":
    sys.exit("no such card")
seen = environment.environment_here()
# One side sees much of the other.
seen = dataclasses.replace(seen, busy_before_cores=float(seen.cores) if "TOLD" in os.environ else 0.0)
turns = Turns()
for number in range(int(samples)):
    with turns:
        pass
turns.close()
place = Path(place)
place.mkdir()
series = record.Series(name="step", unit="s", better="lower", samples=(float(took_s) + int(place.name) / 1e5,) * int(samples))
record.write_record(place / record.FILE, record.BenchRecord(
    bench="matmul", date=f"2026-01-31T12:{int(place.name):02}:00+00:00", settings={"told": os.environ.get("TOLD")},
    environment=seen, series=(series,)))
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.py").write_text(BENCH)
    return shlex.join([sys.executable, str(tmp_path / "bench.py")])


def test_a_small_change_is_told_and_ends_in_1(
    bench: str, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    words = ["--pairs", "8", "--out", "kept", f"{bench} 1.0 5", f"TOLD=x {bench} 1.03 5"]
    assert main(["bench", "ab", *words]) == ExitCode.FAILED
    told = capsys.readouterr()
    assert "busy" not in told.out, "that was the other side"
    assert told.out == snapshot
    assert "pair 8 of 8" in told.err

    # What is there is not measured again, and more pairs make it more certain.
    words[1] = "9"
    main(["bench", "ab", *words, "--json"])
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["records"] == [9, 9]
    assert document["in_pairs"]
    assert "pair 8 of 9" not in told.err
    assert "pair 9 of 9" in told.err


def test_what_a_command_says_when_it_fails_is_told(
    bench: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ab", f"{bench} 1.0 5", f"{bench} broken 5"]) == ExitCode.FAILED
    told = capsys.readouterr().err
    assert "wrote no record" in told
    assert "no such card" in told


def test_two_that_measure_different_things_are_refused(
    bench: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "ab", "--pairs", "1", f"{bench} 1.0 5", f"{bench} 1.0 6"])
    assert code == ExitCode.IMPOSSIBLE
    assert "they took 5 and 6 samples" in capsys.readouterr().err


def test_a_command_that_cannot_be_started_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["bench", "ab", "no-such-program bench data", "no-such-program bench data"])
    assert code == ExitCode.IMPOSSIBLE
    assert "cannot start no-such-program" in capsys.readouterr().err


def test_a_command_is_read_as_it_would_be_typed() -> None:
    assert parse_commands("A=1 B='x y' muster bench data --quick") == AbCommand(
        ("muster", "bench", "data", "--quick"), {"A": "1", "B": "x y"}
    )


@pytest.mark.parametrize(
    "text",
    ["", "A=1", "muster bench data --out x", "muster bench data --out=x", "muster 'bench"],
)
def test_a_command_that_cannot_be_measured_is_refused(
    text: str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as refusal:
        parse_commands(text)
    assert refusal.value == snapshot
