"""What all programs in this folder share: read the request, measure on this rank, write the answer."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.train.world import World, join_world

Request = dict[str, Any]
Measure = Callable[[World, Request], dict[str, Any]]


def answer_request(works: Mapping[str, Measure]) -> None:
    """Run the function that the request names, on all ranks, and write each rank's answer."""
    path, answers = sys.argv[1:]
    request: Request = json.loads(Path(path).read_text(encoding="utf-8"))
    with join_world("cpu" if request["device"] == "cpu" else "auto") as world:
        found = works[request["work"]](world, request)
        leave_answer(answers, world.global_rank, json.dumps(found))
