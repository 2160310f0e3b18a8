"""Names that Prometheus' own checks accept, and that mean one thing."""

import shutil
import subprocess

import pytest

from torchmuster.monitor.catalogue import METRICS
from torchmuster.monitor.exporter import metrics_text
from torchmuster.monitor.metric import Sample


@pytest.mark.prometheus
def test_prometheus_finds_nothing_to_complain_about() -> None:
    samples = [Sample(one, tuple("x" for _ in one.all_labels), 1.0) for one in METRICS]
    text = metrics_text(samples).encode()
    promtool = shutil.which("promtool")
    assert promtool is not None
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
