"""A plan as plain data, for programs."""

from typing import Any

import msgspec

from torchmuster.finding import worst_first
from torchmuster.plan.answer import Answer, Forecast, name_of
from torchmuster.plan.asked import Asked
from torchmuster.plan.hardware.given import in_words
from torchmuster.plan.planning import cost_of

# Raised when a key changes its meaning or goes away; new keys may come at any time.
SCHEMA = 1


def as_json(answer: Answer, *, line: str, settings: dict[str, str]) -> dict[str, Any]:
    """Return everything that a plan says, as plain JSON types."""
    asked, second = answer.asked, answer.runner_up
    return {
        "schema": SCHEMA,
        "fits": True,
        "work": _plain(asked.work),
        "hardware": {**_plain(asked.hardware), "words": in_words(asked.hardware)},
        "precision": {"value": asked.precision.value, "reason": asked.precision.reason},
        "global_batch_size": asked.global_batch_size,
        "parameter_count": answer.parameter_count,
        "tokens_per_sample": answer.tokens_per_sample,
        "chosen": {**_forecast(answer.chosen.value, asked), "reason": answer.chosen.reason},
        "runner_up": second and {**_forecast(second.value, asked), "reason": second.reason},
        "would_change": list(answer.would_change),
        "table": [_forecast(one, asked) for one in answer.table],
        "passed_over": [_plain(one) for one in answer.passed_over],
        "findings": [one.as_json() for one in worst_first(answer.findings)],
        "sources": [{"figure": kind, "source": source} for kind, source in answer.sources],
        "settings": settings,
        "command": line,
        "seconds": round(answer.took_s, 2),
    }


def _forecast(one: Forecast, asked: Asked) -> dict[str, Any]:
    cost = cost_of(one, asked)
    return {
        "name": name_of(one.candidate),
        "fits": one.fits,
        "tight": one.is_tight,
        "spare_bytes": one.spare_bytes,
        "host_spare_bytes": one.host_spare_bytes,
        "samples_per_s": one.samples_per_s,
        "candidate": _plain(one.candidate),
        "memory": _plain(one.memory),
        "time": _plain(one.time),
        "scaling_efficiency": None if one.time is None else one.time.scaling_efficiency,
        "cost": None if cost is None else _plain(cost),
    }


def _plain(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))
