"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="pipeline",
    title="The production pipeline",
    exercises=(
        Exercise(name="trainer", title="everything in one trainer", points=5),
        Exercise(name="profiling", title="time breakdown of a step", points=5, ranks=1),
        Exercise(name="monitor", title="monitoring and alerts", points=5, ranks=1),
    ),
    words={
        "copies-drift": Word(
            "the ranks have different weights after an epoch",
            "the last batch of a group must communicate its gradients, even in a group of one "
            "batch",
            "no_sync for all but the last batch of each group, including a shorter last group",
        ),
        "leftover-dropped": Word(
            "the last, shorter group takes no step",
            "its gradients are discarded, or leak into the next epoch",
            "step after every `accumulation` batches and after the last one",
        ),
        "schedule-forgotten": Word(
            "the learning rate never changes",
            "the scheduler changes only when step() is called",
            "self.scheduler.step() after each optimizer.step()",
        ),
        "schedule-by-batch": Word(
            "the schedule advances with each batch, not with each optimizer step",
            "with an accumulation of N it advances N times too fast",
            "self.scheduler.step() once after optimizer.step()",
        ),
        "schedule-not-saved": Word(
            "the schedule restarts after a load",
            "the learning rate jumps back to its initial value, which harms the training",
            '"scheduler": self.scheduler.state_dict(), and load it again',
        ),
        "checkpoint-torn": Word(
            "a crash in the middle of a save destroys the last checkpoint",
            "torch.save writes into the file that it replaces: a killed job leaves half of it",
            "write to another name, then Path(new).replace(path)",
        ),
        "validated-alone": Word(
            "each rank has a different validation loss",
            "a rank that stops early because of it stops alone, and the others hang",
            "all_reduce sum and count over the ranks, then divide",
        ),
        "no-trace": Word(
            "no trace was written",
            "shares show where to look, the trace shows the details",
            "profile.export_chrome_trace(trace)",
        ),
        "no-markers": Word(
            "the parts are not marked",
            "a trace of 1000 operations without names cannot be mapped to your code",
            "with record_function(name): around each part",
        ),
        "shares-do-not-add-up": Word(
            "the shares do not add up to 1",
            "a share is relative to the whole step",
            "divide each part's time by the sum of all",
        ),
        "first-step-profiled": Word(
            "the first step is in the profile",
            "it allocates, compiles and loads, which distorts the profile",
            "call each part once before profile(…) starts",
        ),
        "logged-on-every-rank": Word(
            "every rank stores rows",
            "eight ranks produce eight curves of the same run",
            "if self.rank == 0",
        ),
        "logged-every-step": Word(
            "every step is stored",
            "each row waits for the device (loss.item()), which slows the training down",
            "if step % self.every == 0",
        ),
        "rows-keep-graphs": Word(
            "rows hold tensors",
            "each one keeps its graph and its device memory alive",
            "loss.item()",
        ),
        "false-alarm": Word(
            "a good run raises an alert",
            "false alarms make users ignore alerts",
            "alert only on a non-finite loss, and on a rate below half of the best",
        ),
        "nan-unnoticed": Word(
            "a loss of NaN or inf raises no alert",
            "comparisons with NaN are False: `loss > limit` never notices it",
            "not math.isfinite(loss)",
        ),
        "slowness-unnoticed": Word(
            "a rate that fell to a third raises no alert",
            "a slow run is easily overlooked",
            "compare with half of the best rate so far",
        ),
    },
    questions=(
        "Which part of a step takes the most time? What would you change first, and what could it gain at most?",
        "Draw the learning rate over 10 epochs. Where would you add a warm-up?",
        "Which alert would have saved you time in your last project, and at which threshold?",
    ),
    on_gpus="Mark with torch.cuda.nvtx as well for Nsight, profile ProfilerActivity.CUDA, and "
    "check the device's "
    "utilization: above 80 % is good. torchmuster provides all of this: ProductionTrainer and "
    "GPUMonitor "
    "in torchmuster.distributed, muster profile, muster watch, muster exporter and its alert rules.",
    counts=True,
)
