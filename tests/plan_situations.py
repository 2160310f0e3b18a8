"""Thirty models on hardware from a laptop to 16,384 cards, with the traces that a plan for each needs.

Traces are kept beside the models' configurations, so that plans can be tested without torch. What is missing is
traced and added by running this file.
"""

import functools
import json
import lzma
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import Impossible
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link
from torchmuster.plan.hardware.cluster_file import parse_hardware
from torchmuster.plan.planning import make_plan
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.report.terminal import offer_text
from torchmuster.plan.request import PlanRequest, request_from_settings
from torchmuster.plan.search.candidates import Look
from torchmuster.plan.timing.rates import usual_rates
from torchmuster.plan.tracing.tracer import Tracer, TraceRefused
from torchmuster.units import GiB

FOLDER = Path(__file__).parent / "unit" / "plan" / "situations"


_NEAR = Link(latency_s=2e-5, bytes_s=5e9, source="made up")
LAPTOP = Hardware(
    card=Gpu(
        name="a laptop's CPU",
        memory_bytes=16 * GiB,
        flops={"float32": 4e11},
        bandwidth_bytes_s=4e10,
        kind="cpu",
        source="made up",
    ),
    machines=1,
    cards_per_machine=1,
    within=_NEAR,
    between=_NEAR,
    host_memory_bytes=16 * GiB,
)


@dataclass(frozen=True)
class Situation:
    """A model, how long its samples are, what it is trained on, and what is fixed."""

    model: str
    sequence_length: int | None  # None: a model of its own, with its dataset beside it
    hardware: str
    fixed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the test of it is called."""
        fixed = "".join(f" {one.rpartition('.')[2]}" for one in self.fixed)
        length = "" if self.sequence_length is None else f" {self.sequence_length}"
        return f"{self.model}{length} on {self.hardware}{fixed}"

    def asked(self) -> PlanRequest:
        """Return it as a question; relative paths begin in FOLDER."""
        if self.sequence_length is None:
            said = [f"model.build={self.model}:model", f"data.dataset={self.model}:data"]
        else:
            said = [
                f"model.model_name_or_path={self.model}",
                f"data.sequence_length={self.sequence_length}",
            ]
        flags = []
        for one in [*said, *self.fixed]:
            path, _, value = one.partition("=")
            flags.append(Flag(flag=path, path=path, text=value))
        on = LAPTOP if self.hardware == "laptop" else parse_hardware(self.hardware)
        return request_from_settings(resolve_settings(flags=flags), on, folder=".")


_BATCH = "train.global_batch_size"
SITUATIONS = (
    # at home
    Situation("gpt2", 1024, "laptop"),
    Situation("gpt2", 1024, "T4"),
    Situation("gpt2", 1024, "RTX4090"),
    Situation("gpt2", 1024, "2xRTX3090"),
    Situation("gpt2", 1024, "8xA100-80GB", (f"{_BATCH}=512",)),
    Situation("qwen-0.5b", 4096, "laptop"),
    Situation("qwen-0.5b", 4096, "RTX4090"),
    Situation("qwen-0.5b", 4096, "8xL4"),
    Situation("vit", None, "laptop"),
    Situation("vit", None, "RTX4090"),
    Situation("vit", None, "8xA100-80GB", (f"{_BATCH}=4096",)),
    Situation("llama-1b", 2048, "RTX3090"),
    Situation("llama-1b", 2048, "H100"),
    Situation("llama-1b", 2048, "8xL4"),
    # a server
    Situation("mistral-7b", 4096, "RTX4090"),
    Situation("mistral-7b", 4096, "4xA100-80GB"),
    Situation("llama-8b", 8192, "H100"),
    Situation("llama-8b", 8192, "8xA100-40GB"),
    Situation("llama-8b", 8192, "8xH100"),
    Situation("llama-8b", 8192, "8xH100", (f"{_BATCH}=64",)),
    Situation("llama-8b", 8192, "8xB200"),
    Situation("llama-8b", 8192, "8xMI300X"),
    # machines
    Situation("llama-8b", 8192, "2x8xH100"),
    Situation("llama-8b", 8192, "128x8xH100"),
    Situation("llama-70b", 8192, "8xH100"),
    Situation("llama-70b", 8192, "8x8xH100"),
    Situation("llama-70b", 8192, "1024xH100"),
    Situation("llama-405b", 8192, "16x8xH100"),
    Situation("llama-405b", 8192, "128x8xH100"),
    Situation("llama-405b", 8192, "16384xH100"),
)


def _answers() -> dict[str, list[str]]:
    path = FOLDER / "answers.json"
    return json.loads(path.read_text()) if path.is_file() else {}


ANSWERS = _answers()


def answer_in_words(situation: Situation, look: Look) -> list[str]:
    """Return the choice with its reason, the runner-up and what would change it; or the refusal."""
    try:
        asked = situation.asked()
        answer = make_plan(asked, look, rates=usual_rates(asked.hardware.card.kind), simulate=False)
    except Impossible as error:
        return str(error).splitlines()
    second = [] if answer.runner_up is None else [answer.runner_up.reason]
    return [answer.chosen.reason, *second, *answer.would_change, *map(offer_text, answer.offers)]


class Missing(Exception):
    """A trace that was not recorded: run this file."""


def recorded(requests: Sequence[TraceRequest]) -> list[TraceRecord | TraceRefused]:
    """Stand for the tracer, with what was recorded."""
    found: list[TraceRecord | TraceRefused] = []
    for one in requests:
        known = _of_model(_model(one))
        if one not in known and one.work.lora_rank is not None:
            found.append(TraceRefused(what="not recorded"))  # an offer is then estimated
            continue
        if one not in known:
            raise Missing(f"python {Path(__file__).name} records what is missing: {one}")
        found.append(known[one])
    return found


def _model(request: TraceRequest) -> str:
    own = (request.work.build or "").partition(":")[0]
    return request.work.model_name_or_path or own


@functools.cache
def _of_model(model: str) -> dict[TraceRequest, TraceRecord]:
    path = FOLDER / f"{model}.jsonl.xz"
    if not path.is_file():
        return {}
    with lzma.open(path) as file:
        records = [msgspec.json.decode(line, type=TraceRecord) for line in file]
    return {one.request: one for one in records}


def _record_missing(situations: Sequence[Situation]) -> None:
    """Plan each situation, tracing what was not recorded yet."""
    os.chdir(FOLDER)
    changed: set[str] = set()
    with Tracer(
        cache=None, workers=int(sys.argv[1]) if len(sys.argv) > 1 else 2, say=print
    ) as tracer:

        def look(requests: Sequence[TraceRequest]) -> list[TraceRecord | TraceRefused]:
            missing = [
                one
                for one in requests
                if one not in _of_model(_model(one))
                and (one.work.lora_rank is None or "--offers" in sys.argv)
            ]
            for one in tracer.records(missing):
                if isinstance(one, TraceRefused):
                    raise RuntimeError(str(one))
                _of_model(_model(one.request))[one.request] = one
                changed.add(_model(one.request))
            return recorded(requests)

        for number, situation in enumerate(situations):
            ANSWERS[situation.name] = answer_in_words(situation, look)
            print(number, situation.name, ANSWERS[situation.name], flush=True)
            for model in changed:
                _keep(model, _of_model(model))
            changed.clear()
            ordered = {one.name: ANSWERS[one.name] for one in situations if one.name in ANSWERS}
            (FOLDER / "answers.json").write_text(json.dumps(ordered, indent=1) + "\n")


def _keep(model: str, records: dict[TraceRequest, TraceRecord]) -> None:
    with lzma.open(FOLDER / f"{model}.jsonl.xz", "wb", preset=6) as file:
        for one in records.values():
            file.write(msgspec.json.encode(one) + b"\n")


if __name__ == "__main__":
    _record_missing(SITUATIONS)
