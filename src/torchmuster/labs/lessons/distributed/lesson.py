"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="distributed",
    title="Distributed training, scaling and accumulation",
    exercises=(
        Exercise(name="prepare", title="equal weights, different noise per rank", points=4),
        Exercise(name="evaluate", title="every sample once", points=4),
        Exercise(name="scaling", title="scaling with more ranks", points=7, ranks=1),
        Exercise(name="accumulate", title="a large batch in small parts", points=5),
        Exercise(name="checkpoint", title="files that survive a crash", points=5),
    ),
    words={
        "copies-differ": Word(
            "the ranks start with different weights",
            "gradients of different models are averaged, which harms the training",
            "return DistributedDataParallel(model), which broadcasts rank 0's weights",
        ),
        "same-noise-everywhere": Word(
            "all ranks draw the same random numbers",
            "augmentation and dropout are then the same on all, as if there were fewer samples",
            "torch.manual_seed(seed + dist.get_rank()), after the model is wrapped",
        ),
        "noise-not-reproducible": Word(
            "the same seed gives different numbers",
            "a run that cannot be repeated cannot be compared or debugged",
            "torch.manual_seed(seed + rank), not torch.seed() or the time",
        ),
        "evaluated-in-training-mode": Word(
            "the model is evaluated in training mode",
            "dropout is on, and batch norm learns from the test data",
            "model.eval() before, model.train() after",
        ),
        "evaluation-keeps-graphs": Word(
            "gradients are enabled during evaluation",
            "activations of every batch are kept: twice the memory for nothing",
            "with torch.no_grad(): around the loop",
        ),
        "left-in-eval-mode": Word(
            "the model stays in evaluation mode",
            "the next epoch trains without dropout, and batch norm is frozen",
            "model.train() at the end",
        ),
        "padded-duplicates": Word(
            "some samples are counted twice",
            "DistributedSampler adds copies until all ranks have equally many samples, so the "
            "metric depends on the number of ranks",
            "use range(rank, len(dataset), world_size), or remove DistributedSampler's copies",
        ),
        "accuracy-averaged": Word(
            "the result is a mean over ranks, not over samples",
            "ranks with fewer samples count as much as those with more",
            "all_reduce the number of correct and of all samples, then divide",
        ),
        "speedup-inverted": Word(
            "more ranks appear slower",
            "the speed-up is the old time divided by the new one",
            "seconds[1] / seconds[ranks]",
        ),
        "efficiency-is-speedup": Word(
            "efficiency is above 1",
            "it is relative to the ideal speed-up, which is the number of ranks",
            "speedup / ranks",
        ),
        "share-of-the-wrong-whole": Word(
            "the share is relative to the time without communication",
            "with 2 of 10 ms in communication, the share is 2/10, not 2/8",
            "(step_s - step_without_sync_s) / step_s",
        ),
        "step-each-micro-batch": Word(
            "the optimizer steps after each micro-batch",
            "the model then trains on small batches instead of one large batch",
            "optimizer.step() once, after the loop",
        ),
        "never-synced": Word(
            "gradients are never sent",
            "each rank trains alone, and the copies diverge silently",
            "do not use no_sync in the last micro-batch",
        ),
        "sync-every-micro-batch": Word(
            "gradients are sent in every micro-batch",
            "the sum is correct, but the communication cost is multiplied by the number of "
            "micro-batches",
            "with model.no_sync(): around forward and backward of all but the last",
        ),
        "loss-not-divided": Word(
            "the step is too large by the number of micro-batches",
            "backward adds up; the mean over all is the mean of the parts divided by their number",
            "(loss / len(micro_batches)).backward()",
        ),
        "no-first-start": Word(
            "it fails without a checkpoint",
            "the first start has no file, and the same command starts and resumes",
            "if not Path(path).exists(): return 0",
        ),
        "not-atomic": Word(
            "a crash in the middle of a save destroys the last checkpoint",
            "a full disk or a killed job leaves a partial file instead of the good one",
            "write to another name, then os.replace(new, path)",
        ),
        "resume-repeats-step": Word(
            "the saved step is repeated",
            "its samples are seen twice, and the schedule is off by one step",
            "return the saved step + 1",
        ),
    },
    questions=(
        "What efficiency do two ranks reach here? What limits them: communication, cores, or the data?",
        "By what factor did no_sync shorten four micro-batches, and when is that worth it?",
        "Four GPUs, 8 samples each, accumulation 4: how many samples does a step have? What happens to the "
        "learning rate if you double the GPUs?",
    ),
    on_gpus="Use one rank per GPU (torchrun --nproc-per-node auto, or muster run --num-gpus 4). "
    "Communication "
    "overlaps with backward, so it is visible only if it takes longer than backward. muster bench "
    "scaling "
    "measures 1, 2, 4 ranks and names the bottleneck.",
    counts=True,
)
