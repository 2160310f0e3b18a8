"""Predicted against measured peaks of tensor memory: real gloo ranks on this machine, 144 fixed cases and any number drawn.

    python benchmarks/plan_memory.py --out plan_memory.jsonl                       the fixed cases
    python benchmarks/plan_memory.py --out plan_memory.jsonl --drawn 40 --seed 7   cases drawn with a seed
    python benchmarks/plan_memory.py --out plan_memory.jsonl --table               what came of them

Each case is one line of the file; those that are there already are skipped, so it can be stopped and started again. Two
predictions are made: *planned* is what ``muster plan`` answers (traces of a few blocks, computed for the whole), *traced* is one
trace of the whole model. How the measured peak is taken: ``peak_memory/truth.py``.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peak_memory.cases import Case, chosen, drawn
from peak_memory.table import as_table
from peak_memory.truth import STEADY, Truth

from torchmuster.errors import Impossible
from torchmuster.plan import estimate
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.real_steps import RealSteps
from torchmuster.plan.record import TraceRequest
from torchmuster.plan.tracer import Tracer

# Only its kind matters here: tensors of ranks on a CPU need no caching allocator.
_HERE = Hardware(
    card=Gpu(name="CPU", kind="cpu", memory_bytes=2**34, flops={}, bandwidth_bytes_s=1e10),
    machines=1,
    cards_per_machine=4,
)


def measure(case: Case, truth: Truth, folder: Path) -> dict[str, Any]:
    """Return the peaks of real ranks, or why there are none."""
    work, candidate = case.work(folder), case.candidate()
    told = truth.measure(RealSteps(work=work, candidate=candidate, device="cpu", timed=0))
    failed = [one["failed"] for one in told if "failed" in one]
    if failed:
        return {"failed": failed[0]}
    steady = [one["peaks_bytes"][STEADY:] for one in told]
    return {
        "measured_bytes": max(map(min, steady)),
        "highest_bytes": max(map(max, steady)),
        "first_step_bytes": max(one["peaks_bytes"][0] for one in told),
        "ranks_bytes": [min(of_rank) for of_rank in steady],
    }


def predict(case: Case, tracer: Tracer, folder: Path) -> dict[str, Any]:
    """Return what is predicted without running anything, or why it cannot be."""
    work, candidate = case.work(folder), case.candidate()
    whole = TraceRequest(work=work, candidate=candidate, kernels="cpu")
    asked = estimate.trace_requests(work, candidate, kernels="cpu")
    try:
        first, *records = map(tracer.trace, [whole, *asked])
    except Impossible as error:
        return {"refused": f"{error.what}; {error.why}"}
    planned = estimate.predict_memory(records, candidate, hardware=_HERE)
    return {
        "traced_bytes": first.peak_bytes,
        "planned_bytes": planned.tensor_bytes,
        "parameters": first.parameter_count,
        "peak_in": planned.peak_at,
    }


def run(cases: Sequence[Case], out: Path, folder: Path, *, seed: int | None) -> None:
    """Measure and predict what the file does not have yet."""
    done = {json.loads(line)["name"] for line in _lines(out)}
    missing = [case for case in cases if case.name not in done]
    print(f"{len(cases)} cases, {len(cases) - len(missing)} of them done already", file=sys.stderr)
    if not missing:
        return
    with Truth(folder) as truth, Tracer() as tracer:
        for number, case in enumerate(missing, start=1):
            begun_s = time.monotonic()
            line = {"name": case.name, "case": asdict(case), "seed": seed}
            line |= measure(case, truth, folder / "models") | predict(
                case, tracer, folder / "models"
            )
            line["took_s"] = round(time.monotonic() - begun_s, 1)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{number}/{len(missing)} {_words(line)}", file=sys.stderr, flush=True)


def _words(line: dict[str, Any]) -> str:
    if "failed" in line or "refused" in line:
        return f"{line['name']}: {line.get('failed') or line['refused']}"
    measured = line["measured_bytes"]
    errors = (line[name] / measured - 1 for name in ("planned_bytes", "traced_bytes"))
    shown = "planned {:+.3%}, traced {:+.3%}".format(*errors)
    return f"{line['name']}: {measured / 2**20:.1f} MiB, {shown}, {line['took_s']:.0f} s"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("plan_memory.jsonl"), help="one line a case"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "muster-plan-memory"
    )
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--case", action="append", help="this one instead, by its name")
    parser.add_argument("--drawn", type=int, help="so many cases drawn at random instead")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--table", action="store_true", help="only show what the file has")
    options = parser.parse_args()
    # As the measured ranks have it: what oneDNN takes for a convolution depends on it.
    os.environ["OMP_NUM_THREADS"] = "1"
    if not options.table:
        seed = options.seed if options.drawn else None
        cases = drawn(options.drawn, options.seed) if options.drawn else chosen()
        if options.case:
            cases = list(map(Case.named, options.case))
        options.folder.mkdir(parents=True, exist_ok=True)
        kept = [case for case in cases if options.only in case.name]
        run(kept, options.out, options.folder, seed=seed)
    print(as_table([json.loads(line) for line in _lines(options.out)]))


if __name__ == "__main__":
    main()
