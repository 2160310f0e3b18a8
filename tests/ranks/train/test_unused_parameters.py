"""Parameters without a gradient are named, before DDP waits for them or FSDP mixes them up."""

import pytest

from rank_group import RunRanks
from rank_programs import strategies

pytestmark = pytest.mark.ranks

WHY = (
    "ddp averages the gradient of every trained parameter, and ranks that wait for one that never "
    "comes wait for ever"
)
COST = (
    "find_unused_parameters=True lets ddp look for them after every forward, at the cost of a walk "
    "through the whole graph in each step"
)


def _refused(run_ranks: RunRanks, ranks: int, ranks_that_use: list[int], more: int = 0) -> str:
    with pytest.raises(AssertionError) as raised:
        run_ranks(strategies.unused, ranks, ranks_that_use, more, False)
    return str(raised.value)


def test_parameters_that_no_rank_uses_are_named_with_both_fixes(run_ranks: RunRanks) -> None:
    text = _refused(run_ranks, 2, [])
    assert (
        "2 trained parameters got no gradient in the first step on any rank: "
        f"spare.weight, spare.bias\n{WHY}\nremove them from the model or freeze them with "
        f"requires_grad_(False), which costs nothing; or {COST}\n"
    ) in text


def test_ranks_that_do_not_use_a_parameter_are_named_while_the_others_wait(
    run_ranks: RunRanks,
) -> None:
    text = _refused(run_ranks, 3, [1])
    assert (
        "2 trained parameters got no gradient in the first step on ranks 0, 2 only: "
        f"spare.weight, spare.bias\n{WHY}\nlet every rank use them in every step, if only with the "
        f"weight 0; or {COST}\n"
    ) in text


def test_ten_names_are_shown_and_the_rest_counted(run_ranks: RunRanks) -> None:
    text = _refused(run_ranks, 1, [0], more=12)
    assert "12 trained parameters got no gradient in the first step: more.0, more.1, " in text
    assert "more.9 and 2 more\n" in text


def test_find_unused_parameters_trains_on(run_ranks: RunRanks) -> None:
    norms = run_ranks(strategies.unused, 2, [1], 0, True)
    assert norms[0] == norms[1]
    assert all(one > 0 for one in norms[0])


def test_fsdp_refuses_gradients_that_only_some_ranks_have(run_ranks: RunRanks) -> None:
    refused = (
        "2 trained parameters got a gradient on some ranks only: right.weight (none on rank 0), "
        "left.weight (none on ranks 1, 2)\n"
        "fsdp adds up over the ranks whatever has a gradient, one after the other: it would add those of "
        "different parameters up\n"
        "let every rank use them in every step, if only with the weight 0; or take ddp with "
        "find_unused_parameters=True, if there is room for a copy on each rank"
    )
    for said in run_ranks(strategies.used_here_and_there, 3):
        assert said == ["True", refused, "True", refused]
