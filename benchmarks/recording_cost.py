"""What recording costs a script: that of ``muster run``, and that of ``muster prove``.

    python benchmarks/recording_cost.py run [--blocks 40] [--steps 200]
    python benchmarks/recording_cost.py prove

run: a small model is trained from a DataLoader. After each block of steps the recorder's functions are replaced by empty ones, or put
back; blocks come in the order on, off, off, on. The difference is the median over the pairs. Beside it: the CPU time of the
recorder's functions per step, which other load does not change.

prove: two small models, with and without recording. Each figure is the median step time of a new process; the processes of a pair run
one after the other.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

# ---- muster prove

STEPS, WARM_UP = 60, 20
ROUNDS = 5


def model_of(name: str) -> tuple[Any, Any]:
    """Return a model and a batch."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)), torch.randn(32, 64)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 64, 256)


def measure(name: str, recorded: bool) -> None:
    """Train in this process and print the median step time in milliseconds."""
    if recorded:
        from torchmuster.prove.probes.recorder import ProofRecorder
        from torchmuster.prove.records import TrialRequest

        folder = tempfile.mkdtemp(prefix="muster-")
        request = TrialRequest(
            command=("x",),
            module=False,
            with_run_folder=False,
            folder=folder,
            into=folder,
            ranks=1,
            device="cpu",
            steps=10**6,
        )
        ProofRecorder(request).install()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters())
    times = []
    for _ in range(STEPS):
        begun_s = time.perf_counter()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begun_s)
    print(statistics.median(times[WARM_UP:]) * 1e3)


def measure_prove() -> None:
    """Measure all pairs and print a line for each model."""
    rows = {}
    for name in ("mlp", "transformer"):
        pairs = []
        for _ in range(ROUNDS):
            pair = [
                float(
                    subprocess.run(
                        [sys.executable, __file__, "one", name, mode],
                        check=True,
                        capture_output=True,
                        text=True,
                    ).stdout
                )
                for mode in ("plain", "recorded")
            ]
            pairs.append(pair)
        parameters = sum(one.numel() for one in model_of(name)[0].parameters())
        ratios = [recorded / plain for plain, recorded in pairs]
        rows[name] = {
            "parameters": parameters,
            "plain_ms": statistics.median(plain for plain, _ in pairs),
            "recorded_ms": statistics.median(recorded for _, recorded in pairs),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
        print(f"{name}: {json.dumps(rows[name])}", flush=True)


# ---- muster run

METHODS = ("optimizer_stepped", "batch_read", "log")


def measure_run(blocks: int, steps: int) -> None:
    """Measure, and print three figures."""
    from torchmuster.integrations.libraries import record_script
    from torchmuster.integrations.recorder import log

    with tempfile.TemporaryDirectory() as folder:
        recorder = record_script(0, Path(folder), 1)
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(torch.randn(steps * 16, 64), torch.randint(0, 10, (steps * 16,)))
        loader = DataLoader(data, batch_size=16)

        def block() -> float:
            began = time.perf_counter()
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                log(loss=loss)
            return (time.perf_counter() - began) / steps * 1e6

        def nothing(*_: Any, **__: Any) -> None:
            pass

        def set_recording(on: bool) -> None:
            for name in METHODS:
                if on:
                    recorder.__dict__.pop(name, None)
                else:
                    setattr(recorder, name, nothing)

        block()
        differences, off_us = [], []
        for number in range(blocks):
            took = {}
            for on in ((True, False), (False, True))[number % 2]:
                set_recording(on)
                took[on] = block()
                recorder.flush()
            differences.append(took[True] - took[False])
            off_us.append(took[False])
        set_recording(True)
        inside = 0.0

        def timed(function: Any) -> Any:
            def call(*arguments: Any, **names: Any) -> None:
                nonlocal inside
                began = time.thread_time()
                function(*arguments, **names)
                inside += time.thread_time() - began

            return call

        for name in METHODS:
            setattr(recorder, name, timed(getattr(recorder, name)))
        block()
    low, middle, high = statistics.quantiles(differences, n=4)
    print(f"a step without recording  {statistics.median(off_us):8.1f} us")
    print(
        f"recording adds            {middle:8.1f} us ({low:+.1f} to {high:+.1f}), with torchmuster.log in every step"
    )
    print(f"inside its functions      {inside / steps * 1e6:8.1f} us of CPU time, clock included")
    print("target: at most 0.5 % of a 20 ms step = 100 us")


def main() -> None:
    """Measure what the command line names."""
    if sys.argv[1:2] == ["one"]:
        measure(sys.argv[2], sys.argv[3] == "recorded")
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "prove"))
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if options.command == "prove":
        measure_prove()
    else:
        measure_run(options.blocks, options.steps)


if __name__ == "__main__":
    main()
