"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="lost-node",
    title="Losing a node",
    exercises=(
        Exercise(name="latest_good", title="the newest complete checkpoint", points=4, ranks=1),
        Exercise(name="remaining", title="the remaining samples", points=5, ranks=1),
        Exercise(name="resume", title="resume exactly", points=4, ranks=1),
        Exercise(name="stopping", title="stop together on request", points=4),
        Exercise(name="interval", title="how often to save", points=3, ranks=1),
    ),
    words={
        "sorted-as-text": Word(
            "the newest is selected by the alphabetical order of its name",
            '"step-9" comes after "step-10" in the alphabet',
            "sort by the number: int(path.stem.partition('-')[2])",
        ),
        "not-verified": Word(
            "an incomplete file is chosen",
            "it comes from an interrupted save; the run fails at every load",
            "compare hashlib.sha256(path.read_bytes()).hexdigest() with the stored one, else try "
            "the next older",
        ),
        "hash-not-there": Word(
            "it fails at a file without its hash",
            "the hash is written last: without it the save is incomplete",
            "if noted.exists(): …, else continue with the next older one",
        ),
        "no-checkpoint-crashes": Word(
            "it fails without any checkpoint",
            "a machine can be lost before the first save",
            "return None",
        ),
        "starts-again": Word(
            "the epoch starts over",
            "some samples are used twice, and the end of the epoch less often than the rest",
            "order[done:]",
        ),
        "done-by-each-rank": Word(
            "each rank skips as many samples as all ranks have processed together",
            "some samples are never used",
            "cut first, then distribute: order[done:][rank::world_size]",
        ),
        "order-depends-on-ranks": Word(
            "the order depends on the number of ranks",
            "after a machine is lost, the rest of the epoch has some samples twice and others never",
            "torch.Generator().manual_seed(seed + epoch), independent of rank and world_size",
        ),
        "same-order-each-epoch": Word(
            "every epoch has the same order",
            "the epoch is not part of the seed",
            "manual_seed(seed + epoch)",
        ),
        "momentum-lost": Word(
            "the optimizer state is not restored",
            "momentum restarts at zero: the loss jumps, and the run differs",
            "save and load optimizer.state_dict()",
        ),
        "random-numbers-lost": Word(
            "random numbers differ after the resume",
            "dropout and augmentation differ: the run cannot be compared with one that was not interrupted",
            "save torch.get_rng_state(), and restore it with torch.set_rng_state",
        ),
        "signal-not-caught": Word(
            "SIGTERM still kills the process",
            "the scheduler's warning, minutes before it reclaims the machine, is lost",
            "signal.signal(signal.SIGTERM, self._note)",
        ),
        "ends-in-handler": Word(
            "the handler exits the process",
            "it may interrupt a save, or a collective in which all others then wait",
            "only set a flag: self.received = True; the loop checks it after each step",
        ),
        "stopped-alone": Word(
            "the ranks do not stop after the same step",
            "the others wait in the next all-reduce for a rank that has exited",
            "all_reduce the flag with ReduceOp.MAX, and return the result",
        ),
        "seconds-not-steps": Word(
            "the result is the time between saves in seconds",
            "the result must be a number of steps",
            "divide by step_s",
        ),
        "hours-not-seconds": Word(
            "hours are used as seconds",
            "saves are 60 times too frequent, and cost more than they save",
            "hours_between_failures * 3600",
        ),
    },
    questions=(
        "How large is your last real checkpoint, and how long would it take to save here?",
        "Plot the cost by save interval: where is it lowest, and how flat is the curve around it?",
        "With 1000 machines that each fail once in 3 years, one machine fails every day. What changes?",
    ),
    on_gpus="The state includes the device's random state (torch.cuda.get_rng_state_all). A lost "
    "node appears as a "
    "collective that never completes; NCCL's watchdog takes minutes, the launcher's heartbeat "
    "seconds. muster run "
    "--max-restarts restarts the ranks on the remaining machines, and muster train --resume "
    "continues with the same losses.",
)
