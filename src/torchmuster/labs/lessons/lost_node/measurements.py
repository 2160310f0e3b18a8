"""Measurements of the report: save time by size, and the resulting save interval."""

import time

import torch
from torch import nn

from torchmuster.labs.measurements import Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench

_STEP_S, _HOURS = 0.5, 24.0


def measure(bench: Bench) -> list[Part]:
    """Save models of several sizes with the learner's code, and resume from one."""
    taken = []
    for width in (64, 256, 512, 1024):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        path = bench.folder / f"{width}.pt"
        samples = []
        for _ in range(3):
            begin = time.perf_counter()
            bench.code.save_all(path, model, optimizer, 1)
            samples.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        bench.code.restore_all(path, model, optimizer)
        taken.append((path.stat().st_size, sorted(samples)[1], time.perf_counter() - begin))
    save_s = taken[-1][1]
    best = bench.code.steps_between_saves(_STEP_S, save_s, _HOURS)
    tried = sorted({max(1, round(best * factor)) for factor in (0.1, 0.25, 0.5, 1, 2, 4, 10)})
    return [
        Curves(
            title="time to save and to load",
            x="size of the file",
            x_unit="B",
            x_log=True,
            y="time",
            y_unit="s",
            series=[
                Series(name="save", points=[(float(size), save) for size, save, _ in taken]),
                Series(name="load", points=[(float(size), load) for size, _, load in taken]),
            ],
        ),
        Curves(
            title="time lost per day, by saving and by one failure",
            x="steps between saves",
            x_log=True,
            y="lost",
            y_unit="s",
            series=[Series(name="", points=[(float(one), _lost_s(one, save_s)) for one in tried])],
        ),
        Table(
            title=f"a save every {best} steps costs least, with steps of {_STEP_S:g} s",
            columns=["file, MB", "save, ms", "load, ms"],
            rows=[
                [f"{size / 1e6:.1f}", f"{save * 1e3:.1f}", f"{load * 1e3:.1f}"]
                for size, save, load in taken
            ],
        ),
    ]


def _lost_s(steps: int, save_s: float) -> float:
    """Return the lost time with one failure: all saves, and half an interval that is repeated."""
    between_s = steps * _STEP_S
    return _HOURS * 3600 / between_s * save_s + between_s / 2
