"""Alerts are raised when they should be, and are the same for Prometheus and for those who run none."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from faster_alerts import RULES, shipped_rules
from torchmuster.monitor import catalogue
from torchmuster.monitor.alert_watch import AlertNews, AlertWatch
from torchmuster.monitor.alerts import ALERTS, WINDOWS_S
from torchmuster.monitor.metric import Sample
from unit.monitor.alert_scenarios import RUN, SCENARIOS, Scenario, Series


def _samples(series: tuple[Series, ...], minute: int) -> list[Sample]:
    return [
        Sample(metric, tuple(labels[name] for name in metric.all_labels), values[minute])
        for metric, labels, values in series
        if minute < len(values)
    ]


def _minutes(scenario: Scenario) -> int:
    return max(len(values) for _, _, values in scenario.series)


def _watched(scenario: Scenario) -> list[AlertNews]:
    watching = AlertWatch()
    for minute in range(_minutes(scenario)):
        watching.look(_samples(scenario.series, minute), 60.0 * minute)
    return watching.raised


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: f"{one.alert}: {one.why}")
def test_an_alert_is_raised_when_it_should_be(scenario: Scenario) -> None:
    raised = {news.alert.name for news in _watched(scenario)}
    assert (scenario.alert in raised) is scenario.raised


def _template(text: str) -> str:
    """Return a text with names in braces as variables of Prometheus' templates."""
    text = text.replace("{value}", "{{ $value | humanize }}")
    text = text.replace("{percent}", "{{ $value | humanizePercentage }}")
    return re.sub(r"(?<!\{)\{([a-z_]+)\}(?!\})", r"{{ $labels.\1 }}", text)


def test_the_rules_for_prometheus_are_the_same_alerts() -> None:
    rules = {rule["alert"]: rule for rule in shipped_rules()}
    del rules["MusterExporterDown"]  # only Prometheus can see it
    assert list(rules) == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        rule = rules[alert.name]
        assert rule["labels"] == {"severity": alert.severity}
        assert float(rule.get("for", "0s").removesuffix("s")) == alert.for_s
        texts = {"summary": alert.summary, "why": alert.why, "fix": alert.fix}
        assert rule["annotations"] == {
            name: _template(text) for name, text in texts.items() if text
        }
        if alert.limit:
            assert float(re.findall(r"[<>] ([\d.e+]+)(?: |$)", rule["expr"])[0]) == alert.limit
        for metric, window_s in WINDOWS_S.items():
            windows = re.findall(rf"{metric.name}\[(\d+)s\]", rule["expr"])
            assert all(float(window) == window_s for window in windows)


@pytest.mark.prometheus
def test_prometheus_raises_the_same_alerts(tmp_path: Path) -> None:
    """promtool evaluates the shipped rules over the same series, minute by minute."""
    tests = [_as_promtool_test(one) for one in SCENARIOS]
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps(content))
    promtool = shutil.which("promtool")
    assert promtool is not None
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _as_promtool_test(scenario: Scenario) -> dict[str, Any]:
    last = _minutes(scenario) - 1
    raised = [news for news in _watched(scenario) if news.alert.name == scenario.alert]
    return {
        "interval": "1m",
        "name": f"{scenario.alert}: {scenario.why}",
        "input_series": [
            {
                "series": f"{metric.name}{{{_labels(labels)}}}",
                "values": " ".join("NaN" if math.isnan(one) else f"{one:g}" for one in values),
            }
            for metric, labels, values in scenario.series
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{scenario.alert}",alertstate="firing"}})',
                "eval_time": f"{last}m",
                "exp_samples": [{"labels": "{}", "value": len(raised)}] if raised else [],
            }
        ],
    }


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def test_it_is_told_once_and_once_more_when_it_is_over() -> None:
    watching = AlertWatch()

    def look(minute: int, age_s: float) -> list[AlertNews]:
        series: tuple[Series, ...] = (
            (catalogue.STEP_AGE, RUN, [age_s]),
            (catalogue.RUN_PHASE, {**RUN, "phase": "running"}, [1.0]),
        )
        return watching.look(_samples(series, 0), 60.0 * minute)

    assert look(0, 10) == []
    (raised,) = look(1, 400)
    assert (raised.raised, raised.alert.name) == (True, "MusterStalled")
    assert "400 s" in raised.summary
    assert raised.fix == "muster explain r1"
    assert look(2, 460) == []
    (over,) = look(3, 2)
    assert (over.raised, over.alert.name) == (False, "MusterStalled")
    assert watching.raised == []


def test_what_must_hold_for_a_while_begins_anew_after_a_gap() -> None:
    watching = AlertWatch()
    series: tuple[Series, ...] = ((catalogue.HOST_DISK_FREE, {"host": "a"}, [1e9]),)
    assert watching.look(_samples(series, 0), 0.0) == []
    assert watching.look([], 30.0) == []
    assert watching.look(_samples(series, 0), 61.0) == []
    (raised,) = watching.look(_samples(series, 0), 130.0)
    assert raised.alert.name == "MusterDiskFull"
