"""What a strategy does to a model, its gradients and its state, on real ranks."""

import math

import pytest

from rank_group import RunRanks
from rank_programs import strategies
from rank_programs.parity import language_model

pytestmark = pytest.mark.ranks

NAMES = sorted(language_model(0).state_dict())


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_have_the_models_own_names_and_load_whole_or_sharded(
    run_ranks: RunRanks, ranks: int
) -> None:
    answers = run_ranks(strategies.states, ranks)
    for told in answers:
        for name, one in told.items():
            assert one["names"] == NAMES, name
            assert one["optimizer names"] == sorted(set(NAMES) - {"head.weight"}), name
            assert one["sharded"] == (name == "fsdp")
            assert one["losses"] == pytest.approx([one["expected"]] * 2, rel=1e-6), name


def test_all_ranks_agree_on_what_is_finite_and_on_the_norm(run_ranks: RunRanks) -> None:
    answers = run_ranks(strategies.gradients, 3)
    for told in answers:
        for name, one in told.items():
            finite = {key: value for key, value in one.items() if not key.startswith("norm")}
            # Gradients of 1e38 are finite, though the squares of their norm are not.
            assert finite == {"good": True, "huge": True, "nan": False, "inf": False}, name
            assert one["norm of good"] == pytest.approx(3.0), name
            assert math.isnan(one["norm of nan"]), name


def test_frozen_parameters_stay_and_the_others_train_alike(run_ranks: RunRanks) -> None:
    alone = run_ranks(strategies.frozen, 1)[0]["single"]
    for told in run_ranks(strategies.frozen, 2):
        for name, models in told.items():
            for one, right in zip(models, alone, strict=True):
                assert one["losses"] == pytest.approx(right["losses"], rel=1e-5), name
                assert one["changed"] == right["changed"], name
                assert not any("layers" in each or "base" in each for each in one["changed"])


def test_bf16_computes_in_bf16_and_keeps_weights_and_sums_in_fp32(run_ranks: RunRanks) -> None:
    for told in run_ranks(strategies.half_precision, 2):
        assert told["fsdp"]["losses"] == pytest.approx(told["ddp"]["losses"], rel=0.02)
        for name, one in told.items():
            assert one["logits"] == "torch.bfloat16", name
            assert one["weights"] == one["gradients"] == {"torch.float32"}, name


@pytest.mark.nightly
def test_batch_normalization_keeps_weights_of_32_bits_in_shards_too(run_ranks: RunRanks) -> None:
    for told in run_ranks(strategies.normalized_batches, 2):
        assert told["fsdp"]["losses"] == pytest.approx(told["ddp"]["losses"], rel=0.02)
        assert told["fsdp"]["losses"][-1] < told["fsdp"]["losses"][0]
        assert told["fsdp"]["means"] == pytest.approx(told["ddp"]["means"], abs=1e-3)
        assert told["fsdp"]["sharded"]


def test_blocks_are_sharded_one_by_one_unless_they_share_weights(run_ranks: RunRanks) -> None:
    for told in run_ranks(strategies.sharded_blocks, 2):
        assert told["language"] == ["", "blocks.0", "blocks.1"]
        assert told["tied"] == ["", "blocks.2"]
        assert told["still tied"]


def test_a_model_has_the_same_values_in_every_strategy(
    run_ranks: RunRanks,
) -> None:
    alone = run_ranks(strategies.values_of_built_models, 1)[0]
    same = {alone[name] for name in ("single", "ddp", "fsdp", "offload")}
    assert len(same) == 1
    assert alone["another seed"] not in same
    for told in run_ranks(strategies.values_of_built_models, 2):
        assert told == {name: value for name, value in alone.items() if "single" not in name}
