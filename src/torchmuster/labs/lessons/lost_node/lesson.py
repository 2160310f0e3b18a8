"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="lost-node",
    title="Losing a node",
    exercises=(
        Exercise(name="latest_good", title="the newest that is whole", points=4, ranks=1),
        Exercise(name="remaining", title="the samples that are left", points=5, ranks=1),
        Exercise(name="resume", title="go on as if nothing had been", points=4, ranks=1),
        Exercise(name="stopping", title="end together when asked", points=4),
        Exercise(name="interval", title="how often to save", points=3, ranks=1),
    ),
    words={
        "sorted-as-text": Word(
            "the newest is looked for by the text of its name",
            '"step-9" comes after "step-10" in the alphabet',
            "sort by the number: int(path.stem.partition('-')[2])",
        ),
        "not-verified": Word(
            "a file that is not whole is taken",
            "whoever was lost while saving left it; the run fails at the load, again and again",
            "compare hashlib.sha256(path.read_bytes()).hexdigest() with the noted one, else the next older",
        ),
        "hash-not-there": Word(
            "it fails at a file without its hash",
            "the hash is written last: without it the save never ended",
            "if noted.exists(): …, else go on to the next older one",
        ),
        "no-checkpoint-crashes": Word(
            "it fails where nothing was saved yet",
            "a machine can be lost before the first save",
            "return None",
        ),
        "starts-again": Word(
            "the epoch begins anew",
            "what was seen is seen twice, and the end of the epoch less often than the rest",
            "order[done:]",
        ),
        "done-by-each-rank": Word(
            "each rank leaves out as many as all have seen together",
            "samples are never seen",
            "cut first, then deal out: order[done:][rank::world_size]",
        ),
        "order-depends-on-ranks": Word(
            "the order depends on the number of ranks",
            "after a machine is lost the rest of the epoch is another one: some twice, some never",
            "torch.Generator().manual_seed(seed + epoch), nothing of rank or world_size in it",
        ),
        "same-order-each-epoch": Word(
            "every epoch has the same order",
            "the epoch is not part of the seed",
            "manual_seed(seed + epoch)",
        ),
        "momentum-lost": Word(
            "the optimiser begins anew",
            "momentum is zero again: the loss jumps, and the run is not the one it was",
            "save and load optimizer.state_dict()",
        ),
        "random-numbers-lost": Word(
            "random numbers are others after the resume",
            "dropout and augmentation differ: the run cannot be compared with one that was not interrupted",
            "save torch.get_rng_state(), and put it back with torch.set_rng_state",
        ),
        "signal-not-caught": Word(
            "SIGTERM still ends the process",
            "the scheduler's warning, minutes before it takes the machine, is lost",
            "signal.signal(signal.SIGTERM, self._note)",
        ),
        "ends-in-handler": Word(
            "the handler ends the process",
            "it interrupts anything: half a save, a collective in which all others then wait",
            "only note it: self.received = True; the loop looks after each step",
        ),
        "stopped-alone": Word(
            "the ranks do not end after the same step",
            "the others wait in the next all-reduce for one that has gone",
            "all_reduce the flag with ReduceOp.MAX, and return what came of it",
        ),
        "seconds-not-steps": Word(
            "it is the time between saves in seconds",
            "asked is the number of steps",
            "divide by step_s",
        ),
        "hours-not-seconds": Word(
            "hours are taken for seconds",
            "saves come 60 times too often, and cost more than they save",
            "hours_between_failures * 3600",
        ),
    },
    questions=(
        "How large is your last real checkpoint, and how long would it take to save here?",
        "At which interval is the cost least in the picture? How flat is the curve around it?",
        "One of 1000 machines fails every day, on average once in 3 years each. What changes?",
    ),
    on_gpus="Random numbers of the device belong to the state too (torch.cuda.get_rng_state_all). A lost node shows as a "
    "collective that never ends; NCCL's watchdog takes minutes, the launcher's heartbeat seconds. muster run --max-restarts "
    "starts the ranks again on the machines that are left, and muster train --resume goes on with the same losses.",
)
