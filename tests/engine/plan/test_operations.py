"""What an operation moves is what it must read and what it writes: bytes counted by hand."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import fully_shard as _registers_the_operations_of_fsdp  # noqa: F401

from torchmuster.plan.probes.live_storage import LiveStorages
from torchmuster.plan.probes.stages import Done
from torchmuster.plan.torch_private import FakeTensorMode

pytestmark = pytest.mark.engine

aten = torch.ops.aten
ROWS, WIDTH = 6, 100
ONE = ROWS * WIDTH * 4  # bytes of a tensor of floats
INDICES = ROWS * 8
NUMBER = 4


def moved(compute: Callable[[], object]) -> dict[str, int]:
    """Return the bytes that each operation moves."""
    seen = LiveStorages(answer=lambda _: None, on_host=False)
    with seen.followed():
        compute()
    return {one.name: one.moved_bytes for one in seen.log.events if isinstance(one, Done)}


def test_what_is_in_place_is_written_and_nothing_else() -> None:
    with FakeTensorMode():
        p, g, m, v = (torch.empty(ROWS, WIDTH) for _ in range(4))
        pairs = [[one, one.clone()] for one in (p, g, m, v)]
        number = torch.empty(())
        found_inf = torch.empty(1)
        step = [torch.empty(()), torch.empty(())]
        many_p, many_g, many_m, many_v = pairs
        for times, compute in (
            (2, lambda: m.mul_(0.9)),
            (3, lambda: m.add_(g)),
            (3, lambda: v.addcmul_(g, g)),  # the same tensor is read once
            (4, lambda: p.addcdiv_(m, v)),
            (3, lambda: torch.add(p, g, out=m)),
            (2 * 2, lambda: torch._foreach_mul_(many_m, 0.9)),
            (2 * 3, lambda: torch._foreach_add_(many_m, many_g)),
            (2 * 3, lambda: torch._foreach_lerp_(many_m, many_g, 0.1)),
            (2 * 3, lambda: torch._foreach_addcmul_(many_v, many_g, many_g)),
            (2 * 4, lambda: torch._foreach_addcdiv_(many_p, many_m, many_v)),
            (2 * 2, lambda: torch._foreach_sqrt(many_v)),
        ):
            assert list(moved(compute).values()) == [times * ONE]
        scaled = moved(lambda: torch._foreach_mul_(many_g, number))
        assert scaled == {"aten._foreach_mul_": 2 * 2 * ONE + NUMBER}
        unscaled = moved(
            lambda: torch._amp_foreach_non_finite_check_and_unscale_(many_g, found_inf, number)
        )
        expected = 2 * 2 * ONE + 3 * NUMBER  # found_inf is read and written
        assert unscaled == {"aten._amp_foreach_non_finite_check_and_unscale_": expected}
        # Its schema says that gradients are written too, which they are where they are unscaled.
        fused = moved(
            lambda: torch._fused_adamw_(
                many_p,
                many_g,
                many_m,
                many_v,
                [],
                step,
                lr=0.1,
                beta1=0.9,
                beta2=0.9,
                weight_decay=0.1,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
        )
        assert fused["aten._fused_adamw_"] == pytest.approx(2 * 8 * ONE, abs=4 * NUMBER)


@pytest.mark.parametrize(
    "compute",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        lambda given: torch.full_like(given, 3),
        lambda given: given.new_zeros(ROWS, WIDTH),
        lambda given: given.zero_(),
        lambda given: given.fill_(3),
        lambda given: given.bernoulli_(0.5),
        lambda given: given.normal_(),
        lambda given: torch._foreach_zero_([given]),
    ],
)
def test_what_is_filled_is_not_read(compute: Callable[[torch.Tensor], object]) -> None:
    with FakeTensorMode():
        given = torch.empty(ROWS, WIDTH)
        assert list(moved(lambda: compute(given)).values()) == [ONE]


def test_a_copy_reads_the_one_and_writes_the_other() -> None:
    with FakeTensorMode():
        halves = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
        whole = torch.empty(ROWS, WIDTH)
        for compute in (
            lambda: whole.copy_(halves),
            lambda: torch._foreach_copy_([whole], [halves]),
            lambda: halves.float(),
        ):
            assert list(moved(compute).values()) == [ONE + ONE // 2]


def test_rows_that_are_picked_are_all_that_is_read() -> None:
    with FakeTensorMode():
        table, logits = torch.empty(50_000, WIDTH), torch.empty(ROWS, 50_000)
        picked = torch.empty(ROWS, dtype=torch.long)
        assert moved(lambda: torch.nn.functional.embedding(picked, table)) == {
            "aten.embedding": 2 * ONE
        }
        none = None
        loss = moved(lambda: aten.nll_loss_forward(logits, picked, none, 1, -100))
        results = 2 * NUMBER
        assert loss == {"aten.nll_loss_forward": ROWS * 4 + INDICES + results}
        image = torch.empty(2, 10, 3, 3), torch.empty(2, 3, 3, dtype=torch.long)
        loss = moved(lambda: aten.nll_loss2d_forward(*image, none, 1, -100))
        assert loss == {"aten.nll_loss2d_forward": 18 * 4 + 18 * 8 + results}
        number = torch.empty(())
        back = moved(lambda: aten.nll_loss_backward(number, logits, picked, none, 1, -100, number))
        assert back == {"aten.nll_loss_backward": ROWS * 50_000 * 4}


def test_what_is_repeated_without_a_copy_is_read_once() -> None:
    with FakeTensorMode():
        row, whole = torch.empty(WIDTH), torch.empty(ROWS, WIDTH)
        repeated = row.expand(ROWS, WIDTH)
        assert moved(lambda: whole * repeated) == {"aten.mul": 2 * ONE + ONE // ROWS}
        assert moved(lambda: repeated.clone()) == {"aten.clone": ONE + ONE // ROWS}


def test_shards_are_copied_once_on_each_way() -> None:
    fsdp = torch.ops.fsdp
    with FakeTensorMode():
        shards = [torch.empty(WIDTH) for _ in range(3)]  # of 8 ranks
        all_of_them = torch.empty(8 * 3 * WIDTH)
        taken = moved(
            lambda: fsdp.all_gather_copy_in(shards, all_of_them, [WIDTH] * 3, 3 * WIDTH, 0)
        )
        assert taken == {"fsdp.all_gather_copy_in": 2 * 3 * WIDTH * 4}
        out = [torch.empty(8, WIDTH) for _ in range(3)]
        rows = all_of_them.view(8, -1)
        assert moved(lambda: fsdp.split_with_sizes_copy(rows, [WIDTH] * 3, dim=1, out=out)) == {
            "fsdp.split_with_sizes_copy": 2 * 8 * 3 * WIDTH * 4
        }
        assert moved(lambda: fsdp.chunk_cat(out, dim=0, num_chunks=8, out=rows)) == {
            "fsdp.chunk_cat": 2 * 8 * 3 * WIDTH * 4
        }


def test_views_and_questions_move_nothing() -> None:
    with FakeTensorMode():
        given = torch.empty(ROWS, WIDTH)
        for compute in (
            lambda: given.device,
            lambda: given.T,
            lambda: given[:2],
            lambda: torch.empty_like(given),
            lambda: given.new_empty(3),
        ):
            assert not moved(compute)
