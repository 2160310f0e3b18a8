"""What a trial of a micro-batch is made of: where it begins, how a step is cut, what its ranks may take."""

import re
import threading
from collections.abc import Sequence

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_plans import FAST, SLOW, WORK, MadeUpModel, question
from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Candidate
from torchmuster.plan.memory import forecast as memory
from torchmuster.plan.memory.forecast import Memory
from torchmuster.plan.proof import fresh_ranks, trials
from torchmuster.plan.proof.fresh_ranks import RankOutput
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.tracing.tracer import TraceRefused
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB, MiB

FSDP = Candidate(strategy="fsdp", layout=ShardLayout(copies=1, shards=8), precision="bf16")
DDP = Candidate(strategy="ddp", layout=ShardLayout(copies=2, shards=1), micro_batch_size=8)
ON_CPU = Hardware(
    card=Gpu(name="CPU", memory_bytes=4 * GiB, flops={}, bandwidth_bytes_s=None, kind="cpu"),
    machines=1,
    cards_per_machine=2,
    within=FAST,
    between=SLOW,
)


@pytest.mark.parametrize("planned", [1, 3, 8])
def test_each_size_is_computed_from_its_own_traces(
    planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MadeUpModel(sample_gib=8.0)

    def predict(
        records: Sequence[TraceRecord], candidate: Candidate, *, hardware: Hardware
    ) -> Memory:
        sizes = {one.request.candidate.micro_batch_size for one in records}
        assert (sizes == {1}) == (candidate.micro_batch_size == 1)
        return model.memory(records, candidate, hardware=hardware)

    monkeypatch.setattr(memory, "predict_memory", predict)
    one = trials.with_size(FSDP, planned, samples=None)
    # 13 GiB of states and 8 for each sample: eight would just fit into 80 GiB.
    assert trials.expected_memory(question(), one, look=model.look) == 8
    assert trials.expected_memory(question(), one, look=model.look, most=6) == 6


def test_where_the_arithmetic_does_not_reach_trials_begin_with_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(requests: Sequence[TraceRequest]) -> list[TraceRefused]:
        return [TraceRefused(what="cannot be followed")] * len(requests)

    three = trials.with_size(FSDP, 3, samples=None)
    assert trials.expected_memory(question(), three, look=refuse) == 3

    def impossible(*args: object, **more: object) -> Memory:
        raise Impossible("cannot be computed")

    monkeypatch.setattr(memory, "predict_memory", impossible)
    assert trials.expected_memory(question(), three, look=MadeUpModel().look) == 3


def test_a_step_is_cut_as_the_training_cuts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []

    def run(program: str, request: str, *, doing: str, **more: object) -> RankOutput:
        asked = msgspec.json.decode(request, type=trials.TrialRequest).candidate
        tried.append((asked.accumulation, asked.micro_batch_size))
        assert doing == f"trying {asked.accumulation} x {asked.micro_batch_size} samples"
        fits = asked.micro_batch_size < 4
        texts = {
            rank: f'{{"rank": {rank}, "ran_out": {str(not fits).lower()}}}' for rank in range(2)
        }
        return RankOutput(texts=texts, trouble=None)

    monkeypatch.setattr(fresh_ranks, "run_fresh_ranks", run)
    found = trials.find_batch_size(
        WORK, DDP, hardware=ON_CPU, start=8, most=8, limits_bytes=[GiB, GiB]
    )
    assert tried == [(1, 8), (2, 4), (4, 2)]
    assert found.value.micro_batch_size == 2


def test_settings_that_go_together_are_advised_together() -> None:
    assert trials.trial_advice(4, DDP, global_batch_size=16) == "--set train.micro_batch_size=4"
    assert trials.trial_advice(4, DDP, global_batch_size=None) == (
        "--set train.micro_batch_size=4 --set train.global_batch_size=8"
    )


def test_ranks_on_the_cpu_share_what_is_free_and_are_more_than_their_tensors(
    snapshot: SnapshotAssertion,
) -> None:
    limit = trials.limit_on_cpu(DDP, ON_CPU, free_bytes=10 * GiB)
    assert limit == int(4.5 * GiB) - 600 * MiB
    with pytest.raises(Impossible) as refused:
        trials.limit_on_cpu(DDP, ON_CPU, free_bytes=GiB)
    assert refused.value == snapshot


def test_long_runs_are_heard_of(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(fresh_ranks, "_SAY_EVERY_S", 0.001)
    said: list[str] = []
    heard = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        heard.set()

    def launch(*args: object) -> int:
        assert heard.wait(GIVE_UP_S)
        return 0

    monkeypatch.setattr(fresh_ranks, "launch_job", launch)
    fresh_ranks.run_fresh_ranks(
        "program",
        "{}",
        ranks=2,
        device="cpu",
        folder=".",
        name="trial",
        doing="real steps",
        say=say,
    )
    assert "2 ranks" in said[0]
    assert re.sub(r"\d+ s\b", "TIME", said[0]) == snapshot
