"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="machines",
    title="Joining machines",
    exercises=(
        Exercise(name="own_address", title="an address that others reach", points=3, ranks=1),
        Exercise(name="connect", title="wait for who comes later", points=4, ranks=1),
        Exercise(name="diagnose", title="what is in the way", points=4, ranks=1),
        Exercise(name="gather_names", title="who is here, who is missing", points=4, joined=False),
        Exercise(name="gathering", title="gather from all", points=2),
        Exercise(name="hello", title="the smoke program", points=3),
    ),
    words={
        "address-by-hostname": Word(
            "the address is the one that the machine's own name leads to",
            "on many machines that is 127.0.1.1: others who are told it connect to themselves",
            "ask the way to the peer: connect a datagram socket to it, and read getsockname()",
        ),
        "socket-not-connected": Word(
            "the socket does not know yet where it leads",
            "before connect its own address is 0.0.0.0, any",
            "probe.connect((peer, 9)) first; nothing is sent",
        ),
        "no-second-try": Word(
            "it gives up at the first failure",
            "machines never start at the same moment",
            "try again until the time is over, with a short pause",
        ),
        "tries-for-ever": Word(
            "it does not give up",
            "a machine that is off keeps all others waiting, and nobody says so",
            "compare time.monotonic() with an end that is computed once",
        ),
        "tries-without-pause": Word(
            "it tries again without any pause",
            "a hundred machines doing so are an attack on the first one",
            "time.sleep(0.1) between two tries",
        ),
        "failure-without-address": Word(
            "the error does not say where nobody answered",
            "the first question of whoever reads it is: which machine, which port?",
            'ConnectionError(f"nobody answers at {address}:{port}: {error}")',
        ),
        "no-deadline": Word(
            "the connection is tried without a time limit",
            "behind a firewall nothing answers at all: the system waits two minutes and more",
            "socket.create_connection((address, port), timeout=within_s)",
        ),
        "all-errors-alike": Word(
            "different failures are told alike",
            "each has another remedy: start the program, open the port, mend the name",
            "except socket.gaierror, except ConnectionRefusedError, except OSError, in this order",
        ),
        "errors-confused": Word(
            "failures are taken for each other",
            "refused means that the machine answered; a firewall is silent",
            "gaierror: unknown-name; ConnectionRefusedError: refused; TimeoutError: silent",
        ),
        "names-as-bytes": Word(
            "the names are bytes",
            "a store holds bytes, whatever was put in",
            "store.get(key).decode()",
        ),
        "one-key-for-all": Word(
            "all ranks write to the same key",
            "the last one overwrites the others, and everybody seems to be it",
            'a key for each rank: f"machine/{rank}"',
        ),
        "missing-not-named": Word(
            "who is missing is not named",
            "of a hundred machines one did not come: which one must somebody look at?",
            "after the wait failed, ask store.check([key]) for each rank, and name those without",
        ),
        "one-tensor-for-all": Word(
            "all places of the list are the same tensor",
            "[torch.zeros(1)] * n makes one tensor and n references: the last writer wins",
            "[torch.zeros(1) for _ in range(n)]",
        ),
        "barrier-only-printed": Word(
            "it says that the barrier is OK without one",
            "the line is the proof that all ranks came that far",
            "dist.barrier() before the last line",
        ),
        "other-lines": Word(
            "the lines are not those that were asked for",
            "others compare them, by eye or by script",
            "as in the docstring, character by character; one print for each line",
        ),
    },
    questions=(
        "How long does a key in the store take, and the names of 1000 machines at that rate?",
        "Which ports must be open between two machines, and in which directions? (muster check tells.)",
        "A machine has two network cards. How do you find out which one NCCL and gloo use?",
    ),
    on_gpus="Nothing of the meeting changes: it is TCP. What follows is NCCL's business: it must take the same "
    "interface (NCCL_SOCKET_IFNAME) that own_address found. muster run --hosts a,b does all of this, muster "
    "host and muster join do it without ssh, and muster check proves every link in both directions.",
    measured_on=2,
)
