"""The alerts as a file of rules for Prometheus."""

import io
import re

from ruamel.yaml import YAML

from torchmuster.monitor.alerts.rules import ALERTS, Alert

_HEAD = """\
# Made by: python -m torchmuster.monitor.alerts.for_prometheus
# In prometheus.yml:   rule_files: [torchmuster-rules.yml]
"""


def rules_file() -> str:
    """Return the file's text."""
    own = [_rule(alert) for alert in ALERTS]
    content = {"groups": [{"name": "torchmuster", "rules": [*own, _EXPORTER_DOWN]}]}
    yaml = YAML()
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump(content, stream)
    return _HEAD + stream.getvalue()


def _rule(alert: Alert) -> dict[str, object]:
    rule: dict[str, object] = {"alert": alert.name, "expr": alert.condition.promql()}
    if alert.for_s:
        rule["for"] = f"{alert.for_s:.0f}s"
    rule["labels"] = {"severity": alert.severity}
    texts = {"summary": alert.summary, "why": alert.why, "fix": alert.fix}
    rule["annotations"] = {name: _template(text) for name, text in texts.items() if text}
    return rule


def _template(text: str) -> str:
    """Return a text whose names in braces are filled in by Prometheus."""
    text = text.replace("{value}", "{{ $value | humanize }}")
    return re.sub(r"(?<!\{)\{([a-z_]+)\}(?!\})", r"{{ $labels.\1 }}", text)


# Only who asks exporters can know that one does not answer; within a run it is seen by its ranks.
_EXPORTER_DOWN = {
    "alert": "MusterExporterDown",
    "expr": 'up{job="torchmuster"} == 0',
    "for": "120s",
    "labels": {"severity": "warning"},
    "annotations": {
        "summary": "{{ $labels.instance }} does not answer",
        "why": "the machine is down, or its exporter is not running",
        "fix": "muster exporter, on that machine",
    },
}

if __name__ == "__main__":
    print(rules_file(), end="")
