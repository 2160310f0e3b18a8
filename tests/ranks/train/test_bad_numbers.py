"""NaN and Inf on one rank: all ranks skip the step and say the same of it."""

import pytest

from rank_group import RunRanks
from rank_programs import mishaps

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_cause_is_named_with_rank_batch_and_layer(run_ranks: RunRanks, name: str) -> None:
    findings, same = run_ranks(mishaps.every_cause, 2, name)
    assert findings == same
    told = {case: (one["what"], one["why"]) for case, one in findings.items()}
    skipped = "all ranks skipped this step"
    assert told["input"] == (
        f"step 41 of epoch 2: rank 1's input batch has NaN (batch[0]); {skipped}",
        "samples of the dataset: 6",
    )
    assert told["layer"] == (
        f"step 41 of epoch 2: rank 1's layer inner.layers.1 returned NaN for finite inputs; {skipped}",
        "samples of the dataset: 4, 5, 6, 7",
    )
    assert told["loss"] == (
        f"step 41 of epoch 2: rank 1's loss function returned Inf for finite outputs of all layers; "
        f"{skipped}",
        "samples of the dataset: 4, 5, 6, 7",
    )
    what, _ = told["weights"]
    rank = 0 if name == "ddp" else 1  # whose shard it is
    assert what == (
        f"step 41 of epoch 2: the weights are already not finite: inner.layers.0.weight on rank {rank}"
        f"; {skipped}"
    )
    for case in ("gradient", "nothing"):
        what, why = told[case]
        assert what.endswith(f"a forward pass is finite when recomputed; {skipped}")
        assert "faulty device" in why
    assert "clean or remove these samples" in findings["input"]["fix"]
    assert "set_detect_anomaly" in findings["gradient"]["fix"]
    assert "muster doctor" in findings["nothing"]["fix"]


def test_too_many_in_a_row_stop_all_ranks(run_ranks: RunRanks) -> None:
    said, same = run_ranks(mishaps.many_in_a_row, 2)
    assert said == same
    skipped = "rank 1's input batch has Inf (batch[1]); all ranks skipped this step"
    assert said[:4] == [f"step {number}: {skipped}" for number in (0, 1, 3, 4)]
    assert said[4] == (
        "step 5: rank 1's input batch has Inf (batch[1]); all ranks stop\n"
        "samples of the dataset: 2; 3 bad steps in a row\n"
        "clean or remove these samples"
    )
    assert said[5] == "step 0: rank 1's input batch has Inf (batch[1]); all ranks stop"
