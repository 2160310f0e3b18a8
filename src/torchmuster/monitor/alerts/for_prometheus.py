"""The alerts as a file of rules for Prometheus.

``--speed 60`` divides all times, so that alerts can be tried out in seconds; the conditions stay the same.
"""

import argparse
import io
import re

from ruamel.yaml import YAML

from torchmuster.monitor.alerts.expression import duration
from torchmuster.monitor.alerts.rules import ALERTS, Alert

_HEAD = """\
# Made by: python -m torchmuster.monitor.alerts.for_prometheus
# In prometheus.yml:   rule_files: [torchmuster-rules.yml]
"""


def rules_file(speed: float = 1.0) -> str:
    """Return the file's text, with all times divided by ``speed``."""
    own = [_rule(alert.faster(speed)) for alert in ALERTS]
    content = {"groups": [{"name": "torchmuster", "rules": [*own, _exporter_down(speed)]}]}
    yaml = YAML()
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump(content, stream)
    return _HEAD + stream.getvalue()


def _rule(alert: Alert) -> dict[str, object]:
    rule: dict[str, object] = {"alert": alert.name, "expr": alert.condition.promql()}
    if alert.for_s:
        rule["for"] = duration(alert.for_s)
    rule["labels"] = {"severity": alert.severity}
    texts = {"summary": alert.summary, "why": alert.why, "fix": alert.fix}
    rule["annotations"] = {name: _template(text) for name, text in texts.items() if text}
    return rule


def _template(text: str) -> str:
    """Return a text whose names in braces are filled in by Prometheus."""
    text = text.replace("{value}", "{{ $value | humanize }}")
    return re.sub(r"(?<!\{)\{([a-z_]+)\}(?!\})", r"{{ $labels.\1 }}", text)


def _exporter_down(speed: float) -> dict[str, object]:
    """Return what only who asks exporters can know: that one does not answer."""
    return {
        "alert": "MusterExporterDown",
        "expr": 'up{job="torchmuster"} == 0',
        "for": duration(120 / speed),
        "labels": {"severity": "warning"},
        "annotations": {
            "summary": "{{ $labels.instance }} does not answer",
            "why": "the machine is down, or its exporter is not running",
            "fix": "muster exporter, on that machine",
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="print the alerts as rules for Prometheus")
    parser.add_argument("--speed", type=float, default=1.0, help="divide all times by this")
    print(rules_file(parser.parse_args().speed), end="")
