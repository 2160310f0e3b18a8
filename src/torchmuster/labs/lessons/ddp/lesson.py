"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="ddp",
    title="Training with DistributedDataParallel",
    exercises=(
        Exercise(name="dataloader", title="each rank its part of the data", points=4, ranks=1),
        Exercise(name="reduce_mean", title="a mean over the ranks", points=3),
        Exercise(name="sync_gradients", title="what DDP does, by hand", points=3),
        Exercise(name="train_epoch", title="an epoch on all ranks", points=5),
        Exercise(name="save_checkpoint", title="one file, whole before anybody reads", points=3),
        Exercise(name="load_checkpoint", title="back on every rank", points=2),
    ),
    words={
        "no-sampler": Word(
            "all ranks are given the same samples",
            "each rank then does the same work, and two ranks learn no more than one",
            "give DataLoader a DistributedSampler(dataset, num_replicas=world_size, rank=rank)",
        ),
        "shuffle-and-sampler": Word(
            "DataLoader was given both a sampler and shuffle=True",
            "who gives a sampler leaves the order to it",
            "DistributedSampler(…, shuffle=True), and DataLoader without shuffle",
        ),
        "no-shuffle": Word(
            "the samples come in the order they are stored in",
            "batches of neighbours (one class after the other) train badly",
            "DistributedSampler(…, shuffle=True)",
        ),
        "sum-not-mean": Word(
            "it is the sum over the ranks, not the mean",
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
            "the step is then world_size times as long: as if the learning rate were multiplied",
            "divide each gradient by dist.get_world_size() after all_reduce",
        ),
        "none-gradient": Word(
            "it fails at a parameter that has no gradient",
            "a parameter that took no part in the loss has grad None",
            "if parameter.grad is not None: …",
        ),
        "no-set-epoch": Word(
            "the sampler is not told which epoch it is",
            "it draws from seed + epoch, so every epoch has the same order (a run looks fine and "
            "learns worse)",
            "dataloader.sampler.set_epoch(self.epoch) before the loop, and count self.epoch up after",
        ),
        "no-zero-grad": Word(
            "gradients of earlier batches are still in the sum",
            "backward adds to what is in .grad",
            "optimizer.zero_grad() before each backward",
        ),
        "not-wrapped": Word(
            "the ranks ended with different weights",
            "without DDP nobody averages the gradients, nor gives all ranks the same beginning",
            "self.model = DistributedDataParallel(model), and call self.model, not the model inside",
        ),
        "loss-of-one-rank": Word(
            "each rank returns a loss of its own",
            "decisions on it (stop early, keep the best) would differ from rank to rank: they hang",
            "all_reduce the sum of losses and the number of samples, then divide",
        ),
        "batches-not-weighted": Word(
            "the mean is over batches, not over samples",
            "a last batch of one sample counts as much as one of two",
            "add up loss.item() * len(inputs) and len(inputs), and divide at the end",
        ),
        "saved-wrapper": Word(
            'the names in the file begin with "module."',
            "that is the wrapper's state: a plain model cannot load it",
            "self.model.module.state_dict()",
        ),
        "no-barrier": Word(
            "a rank went on before the file was there",
            "what it does next, load it for instance, finds half a file or none",
            "dist.barrier() on every rank after the save, outside of `if rank == 0`",
        ),
        "every-rank-saves": Word(
            "every rank writes the file",
            "they overwrite each other's bytes; on a shared disk the file is broken sooner or later",
            "if self.rank == 0: torch.save(…)",
        ),
        "no-optimizer-state": Word(
            "the optimiser's state is not saved",
            "momentum and Adam's averages begin at zero again: the loss jumps after a resume",
            '"optimizer": optimizer.state_dict()',
        ),
        "optimizer-not-loaded": Word(
            "the optimiser was not put back",
            "it goes on with its old rate, and without momentum",
            'optimizer.load_state_dict(state["optimizer"])',
        ),
        "loaded-on-one-rank": Word(
            "only one of the ranks has the loaded weights",
            "DDP gives out weights once, when it wraps; after that nobody compares them",
            "load on every rank, from the same file",
        ),
        "unsafe-load": Word(
            "the file may run any program when it is read",
            "weights_only=False unpickles: whoever wrote the file decides what happens",
            "torch.load(path, map_location=…, weights_only=True)",
        ),
    },
    questions=(
        "Two ranks took how much of one rank's time for an epoch? Where did the rest go?",
        "By which factor did the number of optimiser steps in an epoch change, and what would you do "
        "about the learning rate?",
        "How many bytes does DDP send in a step? Count the parameters, and compare with the table.",
    ),
    on_gpus="Move the model to the rank's device first and pass it on: DistributedDataParallel(model, "
    "device_ids=[local_rank]); the backend is nccl. Gradients are sent while backward still runs, so a "
    "good part of the time in the table is hidden. Batches are moved with non_blocking=True.",
    measured_on=2,
)
