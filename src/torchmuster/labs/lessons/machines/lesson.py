"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="machines",
    title="Joining machines",
    exercises=(
        Exercise(name="own_address", title="an address that others can reach", points=3, ranks=1),
        Exercise(name="connect", title="wait for a peer that starts later", points=4, ranks=1),
        Exercise(name="diagnose", title="diagnose a failed connection", points=4, ranks=1),
        Exercise(
            name="gather_names", title="who has joined, who is missing", points=4, joined=False
        ),
        Exercise(name="gathering", title="gather from all ranks", points=2),
        Exercise(name="hello", title="the smoke test", points=3),
    ),
    words={
        "address-by-hostname": Word(
            "the address is the one that the machine's own name resolves to",
            "on many machines that is 127.0.1.1: other machines would connect to themselves",
            "look up the route to the peer: connect a datagram socket to it, and read "
            "getsockname()",
        ),
        "socket-not-connected": Word(
            "the socket is not connected",
            "before connect its own address is 0.0.0.0",
            "probe.connect((peer, 9)) first; nothing is sent",
        ),
        "no-second-try": Word(
            "it gives up after the first failure",
            "machines never start at the same moment",
            "retry until the time limit, with a short pause",
        ),
        "tries-for-ever": Word(
            "it does not give up",
            "if a machine is off, all others wait forever without a message",
            "compare time.monotonic() with a deadline that is computed once",
        ),
        "tries-without-pause": Word(
            "it retries without a pause",
            "100 machines retrying like this overload the first one",
            "time.sleep(0.1) between two attempts",
        ),
        "failure-without-address": Word(
            "the error does not contain the address and port",
            "the reader needs to know which machine and which port",
            'ConnectionError(f"no answer from {address}:{port}: {error}")',
        ),
        "no-deadline": Word(
            "the connection attempt has no time limit",
            "behind a firewall there is no answer: the system waits two minutes or more",
            "socket.create_connection((address, port), timeout=within_s)",
        ),
        "all-errors-alike": Word(
            "different failures give the same result",
            "each has a different fix: start the program, open the port, correct the name",
            "except socket.gaierror, except ConnectionRefusedError, except OSError, in this order",
        ),
        "errors-confused": Word(
            "failures are confused with each other",
            "refused means that the machine answered; a firewall does not answer",
            "gaierror: unknown-name; ConnectionRefusedError: refused; TimeoutError: silent",
        ),
        "names-as-bytes": Word(
            "the names are bytes",
            "a store returns bytes",
            "store.get(key).decode()",
        ),
        "one-key-for-all": Word(
            "all ranks write to the same key",
            "the last rank overwrites the others, and all names are the same",
            'a key for each rank: f"machine/{rank}"',
        ),
        "missing-not-named": Word(
            "the missing ranks are not named",
            "with 100 machines, the user must know which one did not join",
            "after the wait fails, call store.check([key]) for each rank, and name the missing "
            "ones",
        ),
        "one-tensor-for-all": Word(
            "all elements of the list are the same tensor",
            "[torch.zeros(1)] * n creates one tensor and n references: the last write wins",
            "[torch.zeros(1) for _ in range(n)]",
        ),
        "barrier-only-printed": Word(
            "it prints that the barrier is OK without calling one",
            "the line must prove that all ranks have reached this point",
            "dist.barrier() before the last line",
        ),
        "other-lines": Word(
            "the lines differ from the required ones",
            "scripts and users compare them",
            "print exactly the lines of the docstring, one print per line",
        ),
    },
    questions=(
        "How long does one key in the store take, and how long would 1000 machines take to join?",
        "Which ports must be open between two machines, and in which directions? (See muster "
        "check.)",
        "A machine has two network interfaces. How do you find out which one NCCL and gloo use?",
    ),
    on_gpus="The rendezvous does not change: it is TCP. After it, NCCL must use the same interface "
    "(NCCL_SOCKET_IFNAME) that own_address found. muster run --hosts a,b does all of this, muster "
    "host and "
    "muster join do it without ssh, and muster check tests every link in both directions.",
)
