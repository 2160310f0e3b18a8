"""Groups of ranks with unequal limits, from right and wrong first guesses: the right micro-batch in all."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from batch_size_cases import SMALL, cases, write_model
from made_up_plans import hardware
from rank_group import RunRanks
from rank_programs.batch_sizes import candidate_for
from torchmuster.plan.proof.trials import find_batch_size, with_size

pytestmark = [pytest.mark.stress, pytest.mark.ranks, pytest.mark.timeout(3600)]
CASES = int(os.environ.get("BATCH_CASES", "1"))  # at full length: BATCH_CASES=20


def test_the_right_answer_in_every_case(own_machine: Path, run_ranks: RunRanks) -> None:
    small = write_model(own_machine / "small", rows=SMALL)
    large = write_model(own_machine / "large")
    draws = {small: cases(small, run_ranks, tries=5), large: cases(large, run_ranks)}
    wrong = []
    for number in range(CASES):
        random_numbers = random.Random(number)
        ranks = 2 + number // 2 % 3
        work = large if number // 6 % 2 else small
        case = draws[work]("ddp" if number % 2 else "fsdp", ranks, random_numbers)
        start = max(case.right + random_numbers.choice([0, 0, 1, -1, 4]), 1)
        cpu = hardware(cards=ranks)
        found, trials = find_batch_size(
            work,
            with_size(candidate_for(case.strategy, ranks), start, samples=None),
            hardware=replace(cpu, card=replace(cpu.card, kind="cpu")),
            limits_bytes=case.limits_bytes,
        )
        sizes = [start, *(2**power for power in range(20))]
        allowed = (size for size in sizes if size <= case.right)
        right = max(allowed)
        size, count = found, len(trials)
        print(
            f"{number + 1} of {CASES}: {Path(work.folder).name} samples, {case}: {size}, right {right}, from {start} in {count} trials",
            flush=True,
        )
        if size != right:
            wrong.append((case, found))
    assert not wrong
