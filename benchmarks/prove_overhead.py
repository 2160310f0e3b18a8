"""How much slower is a step that ``muster prove`` records? Two small models, with and without recording, in turn.

Each figure is the median step time of a new process; the processes of a pair run one after the other.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

STEPS, WARM_UP = 60, 20
ROUNDS = 5


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
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
            name="overhead",
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


def main() -> None:
    """Measure all pairs and print a table."""
    rows = {}
    for name in ("mlp", "transformer"):
        pairs = []
        for _ in range(ROUNDS):
            pair = [
                float(
                    subprocess.run(
                        [sys.executable, __file__, name, mode],
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
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(sys.argv[1], sys.argv[2] == "recorded")
    else:
        main()
