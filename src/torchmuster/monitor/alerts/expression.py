"""Conditions over metrics: each renders itself as PromQL and can be evaluated here.

As in PromQL, a value is a number per label set; a comparison keeps the label sets for which it
holds.

``faster`` returns the same condition with all durations divided, for testing alerts in seconds.
"""

import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from torchmuster.monitor.metric import Metric, Sample, Scope

Labels = tuple[tuple[str, str], ...]  # (name, value), in the order of the metric's labels


class SampleHistory:
    """Keeps samples of selected metrics for a limited time."""

    def __init__(self, keep_s: Mapping[Metric, float]) -> None:
        """Keep each of these metrics for its duration in seconds.

        0 keeps only the newest sample.
        """
        self._keep_s = keep_s
        self._kept: dict[Metric, dict[Labels, deque[tuple[float, float]]]] = {}
        self._now_s = 0.0

    def add(self, samples: Iterable[Sample], now_s: float) -> None:
        """Add all current samples; a series without a sample has ended."""
        self._now_s = now_s
        for sample in samples:
            if sample.metric in self._keep_s:
                labels = tuple(zip(sample.metric.all_labels, sample.labels, strict=True))
                series = self._kept.setdefault(sample.metric, {})
                series.setdefault(labels, deque()).append((now_s, sample.value))
        for metric, series in self._kept.items():
            oldest_s = now_s - self._keep_s[metric]
            for labels in list(series):
                values = series[labels]
                while values and values[0][0] < oldest_s:
                    values.popleft()
                if not values:
                    del series[labels]

    def now(self, metric: Metric) -> dict[Labels, float]:
        """Return the newest values."""
        found = self._kept.get(metric, {})
        return {
            labels: values[-1][1]
            for labels, values in found.items()
            if values[-1][0] == self._now_s
        }

    def lately(self, metric: Metric, seconds: float) -> dict[Labels, list[float]]:
        """Return the values within this many seconds."""
        since_s = self._now_s - seconds
        found = self._kept.get(metric, {})
        return {
            labels: lately
            for labels, values in found.items()
            if (lately := [value for at_s, value in values if at_s >= since_s])
        }


Values = Mapping[Labels, float]


class Expression(Protocol):
    """An expression with a value for each label set."""

    def promql(self) -> str:
        """Return the expression as PromQL."""
        ...

    def values(self, history: SampleHistory) -> Values:
        """Return the current values."""
        ...

    def metrics(self) -> frozenset[Metric]:
        """Return the metrics that the expression uses."""
        ...

    def faster(self, times: float) -> Self:
        """Return the same expression with all durations divided."""
        ...


def duration(seconds: float) -> str:
    """Return a duration in Prometheus' format."""
    return f"{seconds:.0f}s" if seconds == round(seconds) else f"{1000 * seconds:.0f}ms"


@dataclass(frozen=True)
class Now:
    """The current value of a metric, optionally filtered by labels."""

    metric: Metric
    where: Mapping[str, str] = field(default_factory=dict)

    def promql(self) -> str:
        """Return the metric's name and the label filter."""
        asked = ",".join(f'{name}="{value}"' for name, value in self.where.items())
        return f"{self.metric.name}{{{asked}}}" if asked else self.metric.name

    def values(self, history: SampleHistory) -> Values:
        """Return the newest samples."""
        wanted = set(self.where.items())
        found = history.now(self.metric)
        return {labels: value for labels, value in found.items() if wanted <= set(labels)}

    def metrics(self) -> frozenset[Metric]:
        """Return the one metric."""
        return frozenset({self.metric})

    def faster(self, times: float) -> Self:
        """Return it unchanged: a current value has no duration."""
        return self


@dataclass(frozen=True)
class Over:
    """The median, maximum or minimum of a metric over a time window."""

    which: str  # median, most, least
    metric: Metric
    seconds: float

    def promql(self) -> str:
        """Return an aggregation over a range."""
        window = f"{self.metric.name}[{duration(self.seconds)}]"
        match self.which:
            case "median":
                return f"quantile_over_time(0.5, {window})"
            case "most":
                return f"max_over_time({window})"
            case _:
                return f"min_over_time({window})"

    def values(self, history: SampleHistory) -> Values:
        """Return the aggregate for each series with samples in the window."""
        function = _FUNCTIONS[self.which]
        found = history.lately(self.metric, self.seconds)
        return {labels: function(values) for labels, values in found.items()}

    def metrics(self) -> frozenset[Metric]:
        """Return the one metric."""
        return frozenset({self.metric})

    def faster(self, times: float) -> Self:
        """Return it over a shorter window."""
        return replace(self, seconds=self.seconds / times)


def _median(values: list[float]) -> float:
    """Return the median as Prometheus computes it: the mean of the two middle values."""
    ordered = sorted(values)
    place = 0.5 * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


_FUNCTIONS: Mapping[str, Callable[[list[float]], float]] = {
    "median": _median,
    "most": lambda values: max(values),
    "least": lambda values: min(values),
}


@dataclass(frozen=True)
class Spread:
    """The spread of a metric within a wider scope, such as the ranks of a run."""

    metric: Metric
    scope: Scope

    def promql(self) -> str:
        """Return maximum minus minimum."""
        by = ", ".join(self.scope.value)
        return f"(max by ({by}) ({self.metric.name}) - min by ({by}) ({self.metric.name}))"

    def values(self, history: SampleHistory) -> Values:
        """Return the spread for each group."""
        groups: dict[Labels, list[float]] = {}
        for labels, value in history.now(self.metric).items():
            kept = tuple(one for one in labels if one[0] in self.scope.value)
            groups.setdefault(kept, []).append(value)
        return {labels: max(values) - min(values) for labels, values in groups.items()}

    def metrics(self) -> frozenset[Metric]:
        """Return the one metric."""
        return frozenset({self.metric})

    def faster(self, times: float) -> Self:
        """Return it unchanged: a current value has no duration."""
        return self


_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True)
class Compared:
    """A comparison with a number, or with another value times a number.

    Keeps matching label sets.
    """

    left: Expression
    how: str  # > < == !=
    number: float
    times: Expression | None = None

    def promql(self) -> str:
        """Return the comparison."""
        if self.times is None:
            return f"{self.left.promql()} {self.how} {self.number:g}"
        factor = "" if self.number == 1 else f"{self.number:g} * "
        return f"{self.left.promql()} {self.how} {factor}{self.times.promql()}"

    def values(self, history: SampleHistory) -> Values:
        """Return the left side where it holds; label sets missing on the right side are dropped."""
        compare = _OPERATORS[self.how]
        left = self.left.values(history)
        if self.times is None:
            return {labels: value for labels, value in left.items() if compare(value, self.number)}
        right = self.times.values(history)
        return {
            labels: value
            for labels, value in left.items()
            if labels in right and compare(value, self.number * right[labels])
        }

    def metrics(self) -> frozenset[Metric]:
        """Return the metrics of both sides."""
        other = frozenset() if self.times is None else self.times.metrics()
        return self.left.metrics() | other

    def faster(self, times: float) -> Self:
        """Return it with both sides faster; a number compared with a duration is divided too."""
        is_time = self.times is None and all(one.unit == "seconds" for one in self.metrics())
        return replace(
            self,
            left=self.left.faster(times),
            number=self.number / times if is_time else self.number,
            times=None if self.times is None else self.times.faster(times),
        )


@dataclass(frozen=True)
class While:
    """A condition restricted to runs for which a second condition holds."""

    condition: Expression
    holds: Expression

    def promql(self) -> str:
        """Return both, matched by run."""
        on = ", ".join(Scope.RUN.value)
        return f"{self.condition.promql()} and on ({on}) {self.holds.promql()}"

    def values(self, history: SampleHistory) -> Values:
        """Return the condition's values for the runs where the second condition holds."""
        runs = {_run_of(labels) for labels in self.holds.values(history)}
        found = self.condition.values(history)
        return {labels: value for labels, value in found.items() if _run_of(labels) in runs}

    def metrics(self) -> frozenset[Metric]:
        """Return the metrics of both."""
        return self.condition.metrics() | self.holds.metrics()

    def faster(self, times: float) -> Self:
        """Return both with all durations divided."""
        return replace(self, condition=self.condition.faster(times), holds=self.holds.faster(times))


def _run_of(labels: Labels) -> Labels:
    return tuple(one for one in labels if one[0] in Scope.RUN.value)
