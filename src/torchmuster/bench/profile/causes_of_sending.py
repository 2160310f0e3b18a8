"""Gradients that are sent at the wrong time, or too often."""

from collections.abc import Sequence

from torchmuster.bench.profile import gains
from torchmuster.bench.profile.analysis import Analysis
from torchmuster.bench.profile.cause import WORTH_FROM, Cause, confirmed, tried
from torchmuster.bench.profile.changes import Change, Trial
from torchmuster.bench.profile.trials_wanted import overlap_wanted
from torchmuster.bench.profile.usual_steps import mean_s, transfer_s
from torchmuster.pages.figures import amount
from torchmuster.units import format_bytes


def no_overlap(analysis: Analysis, trials: Sequence[Trial]) -> Cause | None:
    """Find gradients that are sent when there is nothing left to compute beside it."""
    facts = analysis.facts[0]
    wanted = overlap_wanted(analysis.facts, analysis.steps)
    trial = tried(trials, "buckets")
    if wanted is None or (trial is not None and not confirmed(trial)):
        return None
    computed, hidden = gains.of_overlap(
        analysis.steps, gradient_bytes=facts.gradient_bytes, message_bytes=wanted * 2**20
    )
    exposed_s = transfer_s(analysis.steps)
    messages = gains.messages_of(facts)
    # On a CPU sending takes the cores that compute, so that only a trial knows what overlap is worth.
    gain = computed if facts.device != "cpu" or messages is None else None
    if messages is None:
        how, fix = "by the script, after the backward", "model = DistributedDataParallel(model)"
    else:
        how = f"in {messages} {'message' if messages == 1 else 'messages'}"
        fix = f"DistributedDataParallel(model, bucket_cap_mb={wanted})"
    return Cause(
        name="no-overlap",
        what=f"{exposed_s / analysis.step_s:.0%} of the step waits for gradients to be sent",
        would="sending them during the backward would give",
        gain=gain if trial is None else trial.gain,
        known_by="trace" if trial is None else "trial",
        why=f"{format_bytes(facts.gradient_bytes)} of gradients are sent {how}, when nothing is left to compute; in "
        f"messages of {wanted} MiB, {hidden:.0%} of that fits beside the backward",
        fix=fix,
        evidence=f"even the rank that comes last waits {amount(exposed_s, 's')} of {amount(analysis.step_s, 's')}; "
        f"the backward itself takes {amount(mean_s(analysis.steps, 'backward'), 's')}",
        change=None if messages is None else Change(kind="buckets", value=wanted),
    )


def sent_each_micro_batch(analysis: Analysis, _: Sequence[Trial]) -> Cause | None:
    """Find gradients that are sent for every micro-batch although only their sum is used."""
    facts, traced = analysis.facts[0], analysis.ranks[0].trace
    micro_batches = max(one.micro_batches for step in analysis.steps for one in step.values())
    messages = gains.messages_of(facts)
    if traced is None or messages is None or micro_batches < 2:
        return None
    if traced.messages < messages * micro_batches:
        return None
    saved_s = transfer_s(analysis.steps) * (1 - 1 / micro_batches)
    gain = gains.gain(analysis.steps, lambda *_: 0.0, transfer_saved_s=saved_s)
    if gain < WORTH_FROM:
        return None
    return Cause(
        name="sent-each-micro-batch",
        what=f"gradients are sent {micro_batches} times a step",
        would="sending their sum once would give",
        gain=gain,
        known_by="trace",
        why="DDP sends gradients in every backward unless it is told not to; only the last of a step needs it",
        fix="with model.no_sync():     around forward and backward of all micro-batches but the last",
        evidence=f"{traced.messages:.0f} collectives a step, where {messages} would do",
    )
