"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="pipeline",
    title="The production pipeline",
    exercises=(
        Exercise(name="trainer", title="all of it in one trainer", points=5),
        Exercise(name="profiling", title="where a step's time goes", points=5, ranks=1),
        Exercise(name="monitor", title="be told when it needs you", points=5, ranks=1),
    ),
    words={
        "copies-drift": Word(
            "the ranks have different weights after an epoch",
            "the last batch of a group must send its gradients; so must a group of one batch",
            "no_sync for all but the last batch of each group, also of a shorter last group",
        ),
        "leftover-dropped": Word(
            "the last, shorter group takes no step",
            "its gradients are computed and thrown away, or leak into the next epoch",
            "step after every `accumulation` batches and after the last one",
        ),
        "schedule-forgotten": Word(
            "the rate never changes",
            "the scheduler acts only when it is told",
            "self.scheduler.step() after each optimizer.step()",
        ),
        "schedule-by-batch": Word(
            "the schedule moves with each batch, not with each optimiser step",
            "with accumulation it runs that many times too fast: the rate is at its end too early",
            "self.scheduler.step() once after optimizer.step()",
        ),
        "schedule-not-saved": Word(
            "the schedule begins anew after a load",
            "the rate jumps back to its beginning, and undoes what was learned",
            '"scheduler": self.scheduler.state_dict(), and load it again',
        ),
        "validated-alone": Word(
            "each rank has a validation loss of its own",
            "whoever stops early by it stops alone, and the others hang",
            "all_reduce sum and count over the ranks, then divide",
        ),
        "no-trace": Word(
            "no trace was written",
            "shares say where to look, the trace shows what is there",
            "profile.export_chrome_trace(trace)",
        ),
        "no-markers": Word(
            "the parts are not marked",
            "a trace of a thousand operations without names says nothing about your code",
            "with record_function(name): around each part",
        ),
        "shares-do-not-add-up": Word(
            "the shares do not add up to 1",
            "a share is of the whole step",
            "divide each part's time by the sum of all",
        ),
        "first-step-profiled": Word(
            "the first step is in the profile",
            "it allocates, compiles and loads; the profile is then of that",
            "call each part once before profile(…) begins",
        ),
        "logged-on-every-rank": Word(
            "every rank keeps rows",
            "eight ranks make eight curves of the same run",
            "if self.rank == 0",
        ),
        "logged-every-step": Word(
            "every step is kept",
            "each row waits for the device (loss.item()), which is what makes it slow",
            "if step % self.every == 0",
        ),
        "rows-keep-graphs": Word(
            "rows hold tensors",
            "each one keeps its graph and its device memory alive",
            "loss.item()",
        ),
        "false-alarm": Word(
            "a good run raises an alert",
            "whoever is called for nothing does not come the next time",
            "only a loss that is not finite, and a rate below half of the best",
        ),
        "nan-unnoticed": Word(
            "a loss of NaN or inf raises no alert",
            "comparisons with NaN are False: `loss > limit` never notices it",
            "not math.isfinite(loss)",
        ),
        "slowness-unnoticed": Word(
            "a rate that fell to a third raises no alert",
            "the slowest failure is the one nobody sees",
            "compare with half of the best rate so far",
        ),
    },
    questions=(
        "Which part of a step takes most? What would you change first, and what could it gain at most?",
        "Draw the rate's curve for 10 epochs. Where would you want a warm-up?",
        "Which alert would have saved you time in your last project, and at which threshold?",
    ),
    on_gpus="Mark with torch.cuda.nvtx as well for Nsight, profile ProfilerActivity.CUDA, and look at the device's "
    "utilisation: above 80 % is good. The product has all of this ready: ProductionTrainer and GPUMonitor "
    "in torchmuster.distributed, muster profile, muster watch, muster exporter and its alert rules.",
    measured_on=2,
    counts=True,
)
