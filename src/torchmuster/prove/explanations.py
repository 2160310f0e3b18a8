"""The usual cause of each difference, and how to fix it."""

from torchmuster.finding import Finding, Status
from torchmuster.prove.comparing import Difference

# (property, kind) -> usual cause, fix. {line} is the line of the script, {keys} the content of its checkpoint.
_KNOWN: dict[tuple[str, str], tuple[str, str]] = {
    ("determinism", "weights"): (
        "the random numbers that initialize the weights are not seeded, or depend on the clock or the process",
        "call torch.manual_seed(SEED) before the model is created (transformers: set_seed, Lightning: seed_everything)",
    ),
    ("determinism", "data-order"): (
        "the shuffle is not seeded, or the samples come from a set, a dict or os.listdir, whose order is not fixed",
        "{line}pass generator=torch.Generator().manual_seed(SEED) to the DataLoader, and sort lists of files",
    ),
    ("determinism", "rng"): (
        "dropout or augmentation uses random numbers that are not seeded",
        "call torch.manual_seed(SEED), random.seed(SEED) and numpy.random.seed(SEED) on each rank",
    ),
    ("determinism", "computation"): (
        "a kernel that is not deterministic, such as atomic additions on a GPU, or a thread that changes the order of sums",
        "torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ),
    ("resume", "started-from-zero"): (
        "the script was restarted, and did not load the checkpoint that it had written",
        "pass its resume arguments, for example --resume-with '--resume {path}'; if it has none, load the "
        "newest checkpoint at the start{saved}",
    ),
    ("resume", "older-checkpoint"): (
        "the script chooses its checkpoint in another order than by step: names sort as text (step-9 after step-12), or it "
        "looks at another file",
        "choose the checkpoint with the largest step, as a number, or write a file that names the newest one{saved}",
    ),
    ("resume", "torn-checkpoint"): (
        "the process was killed while it wrote a checkpoint; the next start took the incomplete file",
        "write to a temporary name, then os.replace(temporary, path); load only complete checkpoints{saved}",
    ),
    ("resume", "resume-failed"): (
        "the script stopped with an error when it was started again",
        "run it by hand from its newest checkpoint, and fix the error; pass its resume arguments with --resume-with",
    ),
    ("resume", "weights"): (
        "the checkpoint does not hold the weights of the step exactly, or not all of them: another dtype, a part of the "
        "model, or a save that happens before the step ends",
        "save model.state_dict() unchanged, and load it with strict=True{saved}",
    ),
    ("resume", "buffers"): (
        "buffers, such as the running mean of BatchNorm, are not in the checkpoint, or are not loaded",
        "save model.state_dict(), which has buffers, and not only model.parameters(){saved}",
    ),
    ("resume", "weight-copy"): (
        "an average of the weights (EMA) starts anew from the current weights",
        "save the average as well, and load it after it is created{saved}",
    ),
    ("resume", "optimizer-state"): (
        "the state of the optimizer (momenta, step counts) is not in the checkpoint, or is not loaded",
        "save optimizer.state_dict(), and call optimizer.load_state_dict() after the optimizer is created{saved}",
    ),
    ("resume", "loss-scale"): (
        "the GradScaler starts with its initial scale, so steps are skipped or rounded differently",
        "save scaler.state_dict(), and load it{saved}",
    ),
    ("resume", "learning-rate"): (
        "the schedule is not restored, or it is moved too far: its state is not in the checkpoint, or it is both loaded "
        "and stepped",
        "save scheduler.state_dict(), call scheduler.load_state_dict(), and do not step it for the steps already made{saved}",
    ),
    ("resume", "rng"): (
        "the random states are not restored: dropout or augmentation draws other numbers",
        "save torch.get_rng_state() (torch.cuda.get_rng_state_all(), random.getstate(), numpy.random.get_state()) of each "
        "rank, and set them after loading{saved}",
    ),
    ("resume", "data-order"): (
        "the position in the data, the epoch of the sampler, or the random state of the shuffle is not restored",
        "{line}seed the shuffle by (seed, epoch), call sampler.set_epoch(epoch), and skip the batches already used "
        "(Accelerate: skip_first_batches; torchdata: StatefulDataLoader with its state_dict)",
    ),
    ("resume", "accumulation"): (
        "the script saved between two micro-batches of a step, and the gradients of the first ones are lost",
        "save only after optimizer.step(), or repeat the whole step{saved}",
    ),
    ("resume", "ended-early"): (
        "the script, or its loader, counts epochs or steps that were not made",
        "{line}check what the resumed loader and the loop over epochs believe to be done already",
    ),
    ("resume", "computation"): (
        "the same weights, samples and random states give another result: something that is not in the checkpoint changes "
        "the forward, such as a counter, a curriculum or a cache",
        "save that state as well{saved}",
    ),
    ("ranks", "same-data"): (
        "each rank should train on its own part of the data; here ranks train on the same samples, so more ranks do not "
        "make more progress",
        "{line}use DataLoader(dataset, sampler=DistributedSampler(dataset)), or let the library prepare the loader; if it is "
        "intended (tensor parallelism): --allow same-data",
    ),
    ("ranks", "uneven-batches"): (
        "ranks do not have the same amount of data: samples are lost, or ranks wait for each other at the end of an epoch",
        "{line}give all ranks the same drop_last, and use DistributedSampler, which pads; if it is intended (Join): "
        "--allow uneven-batches",
    ),
    ("ranks", "replicas-differ"): (
        "ranks do not start with the same weights, or do not average all gradients",
        "wrap the model in DistributedDataParallel before the first step, and call it, not its .module",
    ),
    ("ranks", "buffers-differ"): (
        "each rank has its own running statistics, so an evaluation or a checkpoint depends on the rank",
        "keep broadcast_buffers=True of DistributedDataParallel, or use SyncBatchNorm.convert_sync_batchnorm(model)",
    ),
    ("ranks", "epoch-order"): (
        "the sampler's epoch does not change, so each epoch has the same order",
        "{line}call sampler.set_epoch(epoch) at the start of each epoch",
    ),
    ("ranks", "worker-seeds"): (
        "augmentation draws the same random numbers in each loader worker",
        "{line}remove the seed from worker_init_fn, or seed with torch.initial_seed() % 2**32, which differs by worker",
    ),
    ("ranks", "gradient-scale"): (
        "gradients are summed over ranks instead of averaged, or divided twice",
        "divide all-reduced gradients by the number of ranks exactly once (DistributedDataParallel does); scale neither the "
        "loss nor the learning rate for it",
    ),
    ("ranks", "accumulation-scale"): (
        "the loss is not divided by the number of micro-batches",
        "loss = loss / accumulation_steps before backward()",
    ),
    ("ranks", "loss-average"): (
        "the mean of means is not the mean: ranks or micro-batches have different numbers of samples or tokens, and each "
        "one's mean counts the same",
        "divide the sum of losses by the number of samples or tokens of all ranks and micro-batches",
    ),
}


def finding_of(tested: str, difference: Difference, *, allowed: bool) -> Finding:
    """Return a difference as a finding, with its usual cause and fix."""
    why, fix = _KNOWN.get((tested, difference.kind), ("", ""))
    line, saved = "", ""
    if difference.line:
        line = f"{difference.line}: "
        saved = f"\n{difference.line} saves"
        if difference.keys:
            saved += f": {', '.join(difference.keys)}"
    fix = fix.replace("{line}", line).replace("{saved}", saved)
    if difference.also:
        why += f"\nin the same step also: {', '.join(difference.also)}"
    if allowed:
        fix = ""
    return Finding(
        name=f"prove-{tested}-{difference.kind}",
        status=Status.NOTE if allowed else Status.FAILURE,
        what=f"{tested}: {difference.kind}: {difference.what}",
        why=why,
        fix=fix,
    )


def kinds() -> list[str]:
    """Return the names of all differences."""
    return sorted({kind for _, kind in _KNOWN})
