"""The shipped alerts in less time: the same conditions, with durations divided by a speed."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from torchmuster.monitor.alert_watch import AlertNews, AlertWatch
from torchmuster.monitor.metric import Sample

RULES = Path(__file__).parent.parent / "deploy/prometheus/torchmuster-rules.yml"


def shipped_rules() -> list[dict[str, Any]]:
    """Return the rules of the file for Prometheus."""
    (group,) = YAML(typ="safe").load(RULES.read_text())["groups"]
    return list(group["rules"])


def write_faster_rules(path: Path, speed: float) -> None:
    """Write the rules for Prometheus with their windows, waits and limits in seconds divided."""
    rules = shipped_rules()

    def divided(match: "re.Match[str]") -> str:
        return f"{match[1]}{1000 * float(match[2]) / speed:.0f}ms"

    for rule in rules:
        if "for" in rule:
            rule["for"] = re.sub(r"()(\d+)s", divided, rule["for"])
        rule["expr"] = re.sub(r"(\[)(\d+)s", divided, rule["expr"])
        rule["expr"] = re.sub(
            r"(_seconds > )(\d+)(?= |$)",
            lambda match: f"{match[1]}{float(match[2]) / speed:g}",
            re.sub(r"(_seconds > \d+) \*", r"\1  *", rule["expr"]),
        )
    with path.open("w") as stream:
        YAML().dump({"groups": [{"name": "torchmuster", "rules": rules}]}, stream)


class FasterAlertWatch:
    """The product's own watching, for which time passes faster."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._watch = AlertWatch()

    def look(self, samples: Iterable[Sample], now_s: float) -> list[AlertNews]:
        """Add samples whose durations are as much longer as the time is faster."""
        slower = []
        for sample in samples:
            is_duration = sample.metric.name.endswith("_seconds")
            factor = self._speed if is_duration else 1.0
            slower.append(replace(sample, value=sample.value * factor))
        return self._watch.look(slower, now_s * self._speed)

    @property
    def raised(self) -> list[AlertNews]:
        """The alerts that are active now."""
        return self._watch.raised
