"""Test whether ``muster profile`` finds why a training is slow, and how well it predicts the gain of the fix.

    python benchmarks/profile_causes.py --out benchmarks/results/profile-causes.md

Each script of ``tests/slow_scripts`` is slow for one reason. It is profiled as by ``muster profile --verify``: the first advice must
be the reason, with the expected gain. Then the slow and the fixed script (``--mended``) run interleaved, without the profiler, and
their own clocks measure the gain. Healthy trainings must get no advice. Takes about twenty minutes on two CPU ranks; run nothing else at the same
time. Results are stored in ``--kept``, and a second call continues with the rest.
"""

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.profile.analysis import Profile
from torchmuster.profile.causes import Cause, find_causes, with_trials
from torchmuster.profile.facts import ProfileRequest
from torchmuster.profile.trials import record_profile, try_changes

_SCRIPTS = Path(__file__).parents[1] / "tests" / "slow_scripts"
_RECORDED = Path(__file__).parents[1] / "tests" / "recorded_profiles"
# The reason that each script is slow for, by its name.
CAUSES = {
    "starved_loader": "starved-loader",
    "tiny_batch": "tiny-batch",
    "host_reads": "host-reads",
    "no_overlap": "no-overlap",
    "straggler_data": "straggler-data",
    "straggler_forward": "straggler-forward",
    "straggler_backward": "straggler-backward",
    "too_many_threads": "too-many-threads",
    "full_precision": "full-precision",
    "many_saves": "many-saves",
}
HEALTHY = ("healthy", "healthy_with_workers")
_RANKS = ("--ranks", "2", "--device", "cpu")
_SAMPLES = re.compile(r"([\d.]+) samples/s of a rank")
_WITHIN = 0.25


@dataclass(frozen=True, kw_only=True)
class Row:
    """One script: what was said of it, and what mending gave."""

    script: str
    named: str
    expected: float | None
    known_by: str
    measured: tuple[float, ...]  # in each turn

    @property
    def gain(self) -> float:
        """The median of the turns."""
        return statistics.median(self.measured)

    @property
    def off(self) -> float | None:
        """By how much the expected gain differs from the measured one."""
        return None if self.expected is None else self.expected / self.gain - 1.0


def _muster(*words: str, folder: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "torchmuster", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"muster {' '.join(words)}\n{ran.stdout}\n{ran.stderr}")
    return ran.stdout


def _profile(script: str, folder: str) -> list[Cause]:
    """Return the verified causes; the tests judge the facts again, without running the script."""
    request = ProfileRequest(
        command=(str(_SCRIPTS / f"{script}.py"),),
        folder=folder,
        ranks=2,
        device="cpu",
        first_step=20,
        last_step=23,
        into=tempfile.mkdtemp(dir=folder),
    )
    facts = record_profile(request)
    causes = find_causes(Profile(facts))
    gains = try_changes(request, [cause.change for cause in causes if cause.change is not None])
    kept = [replace(rank, host="vm", trace=None) for rank in facts]
    tried = [{"change": change, "gain": gain} for change, gain in gains.items()]
    text = msgspec.json.encode({"facts": kept, "tried": tried})
    (_RECORDED / f"{script}.json.gz").write_bytes(gzip.compress(text, mtime=0))
    return with_trials(causes, gains)


def _samples_per_s(script: str, folder: str, *words: str) -> float:
    said = _muster("run", *_RANKS, str(_SCRIPTS / f"{script}.py"), *words, folder=folder)
    found = _SAMPLES.search(said)
    if found is None:
        sys.exit(f"{script} did not say how fast it was:\n{said}")
    return float(found[1])


def _row(script: str, turns: int, folder: str) -> Row:
    first = _profile(script, folder)[0]
    # A change has a size: so many workers, so large a batch. The mended script takes that of the advice.
    told = ("--value", str(first.change.value)) if first.change else ()
    gains = []
    for _ in range(turns):
        slow = _samples_per_s(script, folder)
        gains.append(_samples_per_s(script, folder, "--mended", *told) / slow)
    return Row(
        script=script,
        named=first.name if first.is_accused else "nothing",
        expected=first.tried or first.gain,
        known_by="trace" if first.tried is None else "trial",
        measured=tuple(gains),
    )


def _table(rows: list[Row], healthy: dict[str, list[str]]) -> str:
    named = sum(one.named == CAUSES[one.script] for one in rows)
    near = sum(one.off is not None and abs(one.off) <= _WITHIN for one in rows)
    quiet = sum(not said for said in healthy.values())
    lines = [
        "# `muster profile`: causes of slow training and gains of their fixes",
        "",
        "Each script of `tests/slow_scripts` is slow for one reason. `muster profile` diagnosed the script; then the slow and the fixed",
        "script ran interleaved, timed by their own clocks, on two ranks and a CPU with two cores.",
        "Written by `benchmarks/profile_causes.py`.",
        "",
        f"The first advice names the reason in {named} of {len(rows)} scripts; the expected gain is within "
        f"{_WITHIN * 100:.0f} % of the measured one in {near} of {len(rows)};",
        f"{quiet} of {len(healthy)} healthy scripts got no advice.",
        "",
        "| script | first advice | expected gain | source | measured gain (each round) | error |",
        "|---|---|---|---|---|---|",
    ]
    for one in rows:
        expected = "-" if one.expected is None else f"{one.expected:.2f}x"
        turns = ", ".join(f"{gain:.2f}" for gain in one.measured)
        off = "-" if one.off is None else f"{one.off * 100:+.0f} %"
        lines.append(
            f"| {one.script} | {one.named} | {expected} | {one.known_by} | {one.gain:.2f}x ({turns}) | {off} |"
        )
    for script, said in healthy.items():
        lines.append(f"| {script} | {', '.join(said) or 'nothing'} | | | | |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Profile and mend each script, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("profile-causes.md"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kept", type=Path, default=Path("profile-causes.json"))
    parser.add_argument("--only", nargs="*", choices=[*CAUSES, *HEALTHY])
    options = parser.parse_args()
    wanted = options.only or [*CAUSES, *HEALTHY]
    kept: dict[str, Any] = json.loads(options.kept.read_text()) if options.kept.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for script in wanted:
            if script in kept:
                continue
            if script in CAUSES:
                kept[script] = asdict(_row(script, options.turns, folder))
            else:
                kept[script] = [one.name for one in _profile(script, folder) if one.is_accused]
            print(script, kept[script], flush=True)
            options.kept.write_text(json.dumps(kept, indent=2))
    rows = [Row(**kept[script]) for script in CAUSES if script in kept]
    healthy = {script: kept[script] for script in HEALTHY if script in kept}
    options.out.write_text(_table(rows, healthy), encoding="utf-8")


if __name__ == "__main__":
    main()
