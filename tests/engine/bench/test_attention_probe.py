"""Every kind of attention gives the same as float64, or is found out; memory is what scores take."""

import re
from pathlib import Path

import msgspec
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench.attention import AttentionAnswer, AttentionRequest
from torchmuster.bench.probes import attention

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KINDS = ("plain", "sdpa", "math", "flash", "efficient")


def request(**changed: object) -> AttentionRequest:
    told: dict[str, object] = {
        "device": "cpu",
        "number_type": "auto",
        "lengths": (32, 160),
        "batch": 2,
        "heads": 2,
        "head_size": 16,
        "causal": True,
        "kinds": KINDS,
        "rounds": 1,
        "longest_s": None,
        "least_sample_s": 0.0,
    }
    return AttentionRequest(**{**told, **changed})  # type: ignore[arg-type]


def measured(**changed: object) -> AttentionAnswer:
    return attention.measure_attention_kinds(request(**changed))


@pytest.mark.parametrize("causal", [True, False])
def test_all_kinds_of_this_device_give_the_same_forward_and_backward(causal: bool) -> None:
    found = measured(causal=causal)
    assert {(one.kind, one.length) for one in found.measured} == {
        (kind, length) for kind in ("plain", "sdpa", "math", "flash") for length in (32, 160)
    }
    for one in found.measured:
        assert one.right
        assert one.error is not None
        assert one.error < 1e-5
        assert one.forward_s
        assert one.training_s
    assert found.missing.keys() == {"efficient"}
    assert "No viable backend" in found.missing["efficient"]


def test_sixteen_bits_are_allowed_their_rounding() -> None:
    found = measured(number_type="bfloat16", lengths=(64,))
    errors = [one.error for one in found.measured]
    assert all(one.right for one in found.measured)
    assert all(error is not None and error > 1e-4 for error in errors)  # it was in 16 bits


def test_a_kind_that_forgets_the_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sees_all = torch.nn.functional.scaled_dot_product_attention

    def unmasked(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool
    ) -> torch.Tensor:
        return sees_all(queries, keys, values)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", unmasked)
    found = measured(lengths=(160,), kinds=("plain", "sdpa"))
    assert {one.kind: one.right for one in found.measured} == {"plain": True, "sdpa": False}


def test_a_kind_whose_backward_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = torch.nn.functional.scaled_dot_product_attention

    def half_the_gradient(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool
    ) -> torch.Tensor:
        values = values / 2 + values.detach() / 2
        return correct(queries, keys, values, is_causal=is_causal)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", half_the_gradient)
    (found,) = measured(lengths=(32,), kinds=("sdpa",)).measured
    assert not found.right


def test_plain_attention_takes_the_memory_of_its_scores_and_flash_does_not() -> None:
    length, sequences_and_heads = 512, 4
    taken = {
        one.kind: one for one in measured(lengths=(length,), kinds=("plain", "flash")).measured
    }
    scores_bytes = sequences_and_heads * length**2 * 4
    plain, flash = taken["plain"], taken["flash"]
    assert plain.training_bytes is not None
    assert plain.training_bytes >= 2 * scores_bytes
    assert flash.training_bytes is not None
    assert flash.training_bytes < scores_bytes


def test_what_would_take_too_long_is_left_out_with_how_long(snapshot: SnapshotAssertion) -> None:
    found = measured(lengths=(32, 64), kinds=("plain",), longest_s=1e-9)
    first, second = found.measured
    assert first.training_s
    assert not second.training_s
    assert re.sub(r"[\d.]+ \w+$", "TIME", second.left_out) == snapshot


def test_without_a_compiler_flex_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = measured(kinds=("plain", "flex"), lengths=(32,))
    assert "no C++ compiler" in found.missing["flex"]


def test_what_is_asked_and_answered_is_json(tmp_path: Path) -> None:
    asked = request(lengths=(16,), kinds=("plain",))
    (tmp_path / "request.json").write_bytes(msgspec.json.encode(asked))
    attention.main(str(tmp_path / "request.json"), str(tmp_path))
    answer = msgspec.json.decode((tmp_path / "rank-0.json").read_bytes(), type=AttentionAnswer)
    assert [one.kind for one in answer.measured] == ["plain"]
