"""Lines that rank 0 recorded, in the run folder's files."""

import json
from pathlib import Path

from torchmuster.launch.history.script_metrics import ScriptMetrics
from torchmuster.launch.node.heartbeats import MetricsReader
from torchmuster.runfolder import RunFolder


def steps_of(run: RunFolder) -> list[int]:
    text = (run.metrics / "steps.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_lines_go_to_their_files(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    lines = [
        {"file": "steps", "step": 1, "loss": 2.0},
        {"file": "saves", "step": 1, "path": "/a"},
        {"file": "../steps", "step": 1},
        {"file": "steps", "step": "one"},
        ["not an object"],
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    ScriptMetrics(run).add(0, f"not JSON\n{text}")
    assert json.loads((run.metrics / "steps.jsonl").read_text()) == {"step": 1, "loss": 2.0}
    assert json.loads((run.metrics / "saves.jsonl").read_text()) == {"step": 1, "path": "/a"}
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == ["saves.jsonl", "steps.jsonl"]


def test_steps_that_a_restart_repeats_replace_the_old_ones(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    metrics = ScriptMetrics(run)
    line = '{"file": "steps", "step": %d}\n'
    metrics.add(0, "".join(line % step for step in (1, 2, 3, 4)))
    metrics.add(1, line % 3)
    metrics.add(1, line % 4)
    assert steps_of(run) == [1, 2, 3, 4]


def test_the_node_agent_reads_whole_lines_only(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path, 0)
    assert reader.new_lines() == ""
    path = tmp_path / "rank-0.metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert reader.new_lines() == '{"step": 1}\n'
    with path.open("a") as stream:
        stream.write("}\n")
    assert reader.new_lines() == '{"step": 2}\n'
    assert reader.new_lines() == ""
