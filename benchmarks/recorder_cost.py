"""What recording costs a script: the same steps with and without it, in turns within one process.

    python benchmarks/recorder_cost.py [--blocks 40] [--steps 200]

A small model is trained from a DataLoader. After each block of steps the recorder's functions are replaced by empty
ones, or put back; blocks come in the order on, off, off, on. The difference is the median over the pairs. Beside it: the
CPU time of the recorder's functions themselves, per step, which other load does not change.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from torchmuster.integrations.libraries import record_script
from torchmuster.integrations.recorder import log

METHODS = ("optimizer_stepped", "batch_read", "log")


def main() -> None:
    """Measure, and print three figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorder = record_script(0, Path(folder), 1)
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(
            torch.randn(options.steps * 16, 64), torch.randint(0, 10, (options.steps * 16,))
        )
        loader = DataLoader(data, batch_size=16)

        def block() -> float:
            began = time.perf_counter()
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                log(loss=loss)
            return (time.perf_counter() - began) / options.steps * 1e6

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
        for number in range(options.blocks):
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
    print(
        f"inside its functions      {inside / options.steps * 1e6:8.1f} us of CPU time, clock included"
    )
    print("target: at most 0.5 % of a 20 ms step = 100 us")


if __name__ == "__main__":
    main()
