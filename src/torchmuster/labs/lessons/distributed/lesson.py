"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="distributed",
    title="Distributed training, scaling and accumulation",
    exercises=(
        Exercise(name="prepare", title="one beginning, noise of each rank's own", points=4),
        Exercise(name="evaluate", title="every sample once", points=4),
        Exercise(name="scaling", title="what more ranks bring", points=7, ranks=1),
        Exercise(name="accumulate", title="a large batch in small parts", points=5),
        Exercise(name="checkpoint", title="files that survive a crash", points=5),
    ),
    words={
        "copies-differ": Word(
            "the ranks begin with different weights",
            "their gradients are averaged, but of different models: nothing is learned well",
            "return DistributedDataParallel(model), which gives rank 0's weights to all",
        ),
        "same-noise-everywhere": Word(
            "all ranks draw the same random numbers",
            "augmentation and dropout are then the same on all, as if there were fewer samples",
            "torch.manual_seed(seed + dist.get_rank()), after the model is wrapped",
        ),
        "noise-not-reproducible": Word(
            "the same seed gives other numbers",
            "a run that cannot be repeated cannot be compared or debugged",
            "torch.manual_seed(seed + rank), not torch.seed() or the time",
        ),
        "evaluated-in-training-mode": Word(
            "the model is evaluated as if it trained",
            "dropout is on, and batch norm learns from the test data",
            "model.eval() before, model.train() after",
        ),
        "evaluation-keeps-graphs": Word(
            "gradients are prepared while evaluating",
            "activations of every batch are kept: twice the memory for nothing",
            "with torch.no_grad(): around the loop",
        ),
        "left-in-eval-mode": Word(
            "the model stays in evaluation mode",
            "the next epoch trains without dropout, and batch norm stands still",
            "model.train() at the end",
        ),
        "padded-duplicates": Word(
            "some samples are counted twice",
            "DistributedSampler fills up until every rank has as many: the metric depends on the ranks",
            "take range(rank, len(dataset), world_size), or DistributedSampler's copies out again",
        ),
        "accuracy-averaged": Word(
            "it is a mean over ranks, not over samples",
            "ranks with fewer samples count as much as those with more",
            "all_reduce how many are right and how many there are, then divide",
        ),
        "speedup-inverted": Word(
            "more ranks come out as slower",
            "the speed-up is the old time divided by the new one",
            "seconds[1] / seconds[ranks]",
        ),
        "efficiency-is-speedup": Word(
            "efficiency is above 1",
            "it is the share of an ideal speed-up, which is the number of ranks",
            "speedup / ranks",
        ),
        "share-of-the-wrong-whole": Word(
            "the share is of the time without communication",
            "a step of 10 ms of which 2 go to messages spends 2/10 there, not 2/8",
            "(step_s - step_without_sync_s) / step_s",
        ),
        "step-each-micro-batch": Word(
            "the optimiser steps after each micro-batch",
            "these are small batches then, not one large one",
            "optimizer.step() once, after the loop",
        ),
        "never-synced": Word(
            "gradients are never sent",
            "each rank learns alone, and the copies drift apart without a word",
            "leave no_sync in the last micro-batch",
        ),
        "sync-every-micro-batch": Word(
            "gradients are sent in every micro-batch",
            "the sum is right, but the messages cost as many times as there are micro-batches",
            "with model.no_sync(): around forward and backward of all but the last",
        ),
        "loss-not-divided": Word(
            "the step is as many times too long as there are micro-batches",
            "backward adds up; the mean over all is the mean of the parts divided by their number",
            "(loss / len(micro_batches)).backward()",
        ),
        "no-first-start": Word(
            "it fails where there is nothing to resume from",
            "the first start has no file, and the same command starts and resumes",
            "if not Path(path).exists(): return 0",
        ),
        "not-atomic": Word(
            "a crash in the middle of a save destroys the last checkpoint",
            "a full disk or a killed job leaves half a file where the good one was",
            "write to another name, then os.replace(new, path)",
        ),
        "resume-repeats-step": Word(
            "the step that was saved is done again",
            "its samples are seen twice, and the schedule is one off",
            "return the saved step + 1",
        ),
    },
    questions=(
        "Which efficiency do two ranks reach here? What limits them: communication, cores, or the data?",
        "By which factor did no_sync shorten four micro-batches, and when is that worth it?",
        "Four GPUs, 8 samples each, accumulation 4: how many samples has a step? What happens to the "
        "learning rate if you double the GPUs?",
    ),
    on_gpus="Use one rank per GPU (torchrun --nproc-per-node auto, or muster run --num-gpus 4). Gradients are sent "
    "while backward still runs, so communication shows only where it takes longer than backward. "
    "muster bench scaling measures 1, 2, 4 ranks and says where the rest of the time goes.",
    measured_on=2,
    counts=True,
)
