"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="ddp",
    title="Training with DistributedDataParallel",
    exercises=(
        Exercise(name="dataloader", title="split the data over the ranks", points=4, ranks=1),
        Exercise(name="reduce_mean", title="a mean over the ranks", points=3),
        Exercise(name="sync_gradients", title="what DDP does, by hand", points=3),
        Exercise(name="train_epoch", title="an epoch on all ranks", points=5),
        Exercise(
            name="save_checkpoint", title="one complete file before any rank reads it", points=3
        ),
        Exercise(name="load_checkpoint", title="restore on every rank", points=2),
    ),
    words={
        "no-sampler": Word(
            "all ranks get the same samples",
            "each rank does the same work, and two ranks learn no more than one",
            "give DataLoader a DistributedSampler(dataset, num_replicas=world_size, rank=rank)",
        ),
        "shuffle-and-sampler": Word(
            "DataLoader was given both a sampler and shuffle=True",
            "with a sampler, the sampler decides the order",
            "DistributedSampler(…, shuffle=True), and DataLoader without shuffle",
        ),
        "no-shuffle": Word(
            "the samples are in storage order",
            "batches of neighbouring samples (one class after the other) train badly",
            "DistributedSampler(…, shuffle=True)",
        ),
        "sum-not-mean": Word(
            "the result is the sum over the ranks, not the mean",
            "all_reduce adds up; with more ranks the value grows",
            "divide by dist.get_world_size(), or dist.all_reduce(x, op=dist.ReduceOp.AVG) on NCCL",
        ),
        "changes-its-argument": Word(
            "the caller's tensor has been overwritten",
            "all_reduce works in place; a loss that is reduced twice is then wrong",
            "reduce a copy: value.clone()",
        ),
        "gradients-summed": Word(
            "gradients are added up over the ranks",
            "the step is then world_size times as large, like a higher learning rate",
            "divide each gradient by dist.get_world_size() after all_reduce",
        ),
        "none-gradient": Word(
            "it fails at a parameter that has no gradient",
            "a parameter that is not used in the loss has grad None",
            "if parameter.grad is not None: …",
        ),
        "no-set-epoch": Word(
            "set_epoch is not called on the sampler",
            "the sampler shuffles with seed + epoch, so every epoch has the same order: the run "
            "looks fine but learns worse",
            "dataloader.sampler.set_epoch(self.epoch) before the loop, and increment self.epoch "
            "after it",
        ),
        "no-zero-grad": Word(
            "gradients of earlier batches are still in the sum",
            "backward adds to what is in .grad",
            "optimizer.zero_grad() before each backward",
        ),
        "not-wrapped": Word(
            "the ranks ended with different weights",
            "without DDP gradients are not averaged, and the initial weights differ",
            "self.model = DistributedDataParallel(model), and call self.model, not the model inside",
        ),
        "loss-of-one-rank": Word(
            "each rank returns a different loss",
            "decisions based on it (early stopping, best checkpoint) differ between ranks and "
            "cause hangs",
            "all_reduce the sum of losses and the number of samples, then divide",
        ),
        "batches-not-weighted": Word(
            "the mean is over batches, not over samples",
            "a last batch of one sample counts as much as a batch of two",
            "add up loss.item() * len(inputs) and len(inputs), and divide at the end",
        ),
        "saved-wrapper": Word(
            'the names in the file begin with "module."',
            "that is the wrapper's state: a plain model cannot load it",
            "self.model.module.state_dict()",
        ),
        "no-barrier": Word(
            "a rank continued before the file existed",
            "if it loads the file next, it finds a partial file or none",
            "dist.barrier() on every rank after the save, outside of `if rank == 0`",
        ),
        "every-rank-saves": Word(
            "every rank writes the file",
            "they overwrite each other; on a shared disk the file will be corrupted",
            "if self.rank == 0: torch.save(…)",
        ),
        "no-optimizer-state": Word(
            "the optimizer state is not saved",
            "momentum and Adam's averages restart at zero: the loss jumps after a resume",
            '"optimizer": optimizer.state_dict()',
        ),
        "optimizer-not-loaded": Word(
            "the optimizer was not restored",
            "it continues with its old learning rate and without momentum",
            'optimizer.load_state_dict(state["optimizer"])',
        ),
        "loaded-on-one-rank": Word(
            "only one rank has the loaded weights",
            "DDP broadcasts weights only when it wraps the model; later differences are not "
            "detected",
            "load on every rank, from the same file",
        ),
        "unsafe-load": Word(
            "loading the file may execute arbitrary code",
            "weights_only=False unpickles: the author of the file controls what is executed",
            "torch.load(path, map_location=…, weights_only=True)",
        ),
    },
    questions=(
        "What share of one rank's time did two ranks need for an epoch? Where did the rest go?",
        "By what factor did the number of optimizer steps per epoch change, and how would you "
        "adapt "
        "the learning rate?",
        "Count the parameters: how many bytes does DDP send per step?",
    ),
    on_gpus="The solution runs there unchanged: the model moves to the rank's device, and DDP gets "
    "device_ids; the backend is nccl. Communication overlaps with backward, so a "
    "large part of its time is hidden. Batches are moved with non_blocking=True.",
)
