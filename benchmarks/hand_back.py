"""Measure how long a borrower takes to give a GPU back, from the request to the claim of the requester.

    python benchmarks/hand_back.py [--rounds 50] [--out docs/measured/hand-back.md]

One host with the NVML stub (8 GPUs) and ranks on the CPU. ``muster train --num-gpus 1:2 --borrow`` trains with two ranks; a requester
asks for seven GPUs at a random moment, holds them for a moment, and the borrower borrows the GPU again.
"""

import argparse
import ctypes
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import nvml_stub  # noqa: E402
from nvml_stub import scenarios  # noqa: E402
from torchmuster.devices import snapshot  # noqa: E402
from torchmuster.devices.acquire import acquire_devices  # noqa: E402
from torchmuster.devices.claims import Claims  # noqa: E402
from torchmuster.devices.request import Claim, DeviceRequest  # noqa: E402

WITHIN_S = 600.0
WIDTH = 1024
MODEL = f"""
import time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

def model():
    torch.manual_seed(0)
    register_optimizer_step_post_hook(lambda *_: time.sleep(0.05))
    return torch.nn.Sequential(torch.nn.Linear(64, {WIDTH}), torch.nn.Linear({WIDTH}, {WIDTH}), torch.nn.Linear({WIDTH}, 10))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, row):
        return torch.randn(64, generator=torch.Generator().manual_seed(row)), row % 10

def data():
    return Rows()
"""
SETTINGS = """
model: {build: "mine:model", loss: cross_entropy}
data: {dataset: "mine:data"}
train: {steps: 1000000, global_batch_size: 16, log_every: 1}
launch: {borrow_every: 1s}
"""


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = _stub(folder)
        (folder / "mine.py").write_text(MODEL)
        (folder / "config.yaml").write_text(SETTINGS)
        words = ("train", "--config", "config.yaml", "--num-gpus", "1:2", "--borrow")
        with (folder / "said.txt").open("wb") as said:
            run = subprocess.Popen(
                [sys.executable, "-m", "torchmuster", *words],
                cwd=folder,
                env={**os.environ, **environment},
                stdout=said,
                stderr=said,
            )
            try:
                results = measure(folder, options.rounds, random.Random(options.seed))
            finally:
                run.terminate()
                run.wait(120)
        given = [
            event["seconds"] for event in _events(folder) if event["event"] == "gpus-given-back"
        ]
    text = report(results, given, os.getloadavg()[1])
    print(text)
    if options.out is not None:
        options.out.write_text(text)


def _stub(folder: Path) -> Mapping[str, str]:
    """Put this process and the run on a host with eight idle GPUs."""
    library = nvml_stub.build(folder / "nvml")
    ctypes.CDLL(str(library / nvml_stub.LIBRARY), mode=ctypes.RTLD_GLOBAL)
    path = nvml_stub.write(folder / "gpus.json", scenarios.eight_a100_idle())
    environment = {
        "LD_LIBRARY_PATH": str(library),
        nvml_stub.SCENARIO_VARIABLE: str(path),
        "TORCHMUSTER_CLAIMS_DIR": str(folder / "claims"),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    os.environ.update(environment)
    return environment


def measure(folder: Path, rounds: int, chance: random.Random) -> list[tuple[float, float]]:
    """Return for each round the seconds until the claim, and until the borrower's next step."""
    claims = Claims(folder / "claims")
    results = []
    for number in range(rounds):
        _wait(lambda: any(claim.borrowed for claim in _claimed(claims).values()))
        _wait_for_steps(folder)
        time.sleep(chance.uniform(0.0, 2.0))
        began_s, began_unix_s = time.monotonic(), time.time()
        with acquire_devices(
            claims,
            snapshot.take_snapshot,
            DeviceRequest(count=7),
            environment={},
            wait_s=WITHIN_S,
            command=["requester"],
        ):
            got_s = time.monotonic() - began_s
            _wait_for_step(folder, began_unix_s + got_s)
            again_s = time.monotonic() - began_s
        results.append((got_s, again_s))
        print(f"{number + 1}: {got_s:.2f} s, next step after {again_s:.1f} s", file=sys.stderr)
    return results


def _wait_for_steps(folder: Path) -> None:
    """Wait until two ranks have started and finished some steps."""

    def started() -> list[dict[str, float]]:
        return [event for event in _events(folder) if event["event"] == "started"]

    _wait(lambda: bool(started()) and started()[-1]["ranks"] == 2)
    _wait_for_step(folder, started()[-1]["at_unix_s"] + 0.2)


def _wait_for_step(folder: Path, after_unix_s: float) -> None:
    _wait(lambda: _last_step_unix_s(folder) > after_unix_s)


def _claimed(claims: Claims) -> dict[str, Claim]:
    return claims.glance(one.uuid for one in snapshot.take_snapshot().accelerators).claimed


def _last_step_unix_s(folder: Path) -> float:
    last = 0.0
    for path in folder.glob("runs/*/metrics/steps.jsonl"):
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 4096))
            lines = stream.read().splitlines()
        for line in lines[1:]:
            try:
                last = max(last, json.loads(line)["at_unix_s"])
            except (ValueError, KeyError):
                continue
    return last


def _events(folder: Path) -> list[dict[str, float]]:
    paths = list(folder.glob("runs/*/events.jsonl"))
    lines = itertools.chain.from_iterable(path.read_text().splitlines() for path in paths)
    return [json.loads(line) for line in lines]


def _wait(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the borrower does not answer")
        time.sleep(0.1)


def report(results: list[tuple[float, float]], given: list[float], load: float) -> str:
    """Return the results as a page."""
    got, again = [one for one, _ in results], [one for _, one in results]
    rows = [
        ("from the request to the claim of the requester", got),
        ("of this, measured by the borrower: from the notice to the release", given),
        ("from the request to the borrower's next step on one GPU", again),
    ]
    table = "\n".join(
        f"| {name} | {len(times)} | {statistics.median(times):.2f} | {max(times):.2f} |"
        for name, times in rows
    )
    states_mib = 3 * 4 * (64 * WIDTH + WIDTH * WIDTH + 10 * WIDTH) / 2**20
    return f"""# Time until a borrowed GPU is given back

Written by `benchmarks/hand_back.py --rounds {len(results)}`: one host with the NVML stub, two ranks on the CPU (gloo) that save
{states_mib:.0f} MiB, steps of at least 50 ms, 2 cores at load {load:.0f} because the machine was busy with other work. Times in seconds.

| | requests | median | worst |
|---|---|---|---|
{table}
"""


if __name__ == "__main__":
    main()
