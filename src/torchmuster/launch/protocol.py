"""What the launcher and the node agents say to each other: typed messages as lines of JSON.

The launcher is the one process in which somebody typed ``muster run``. A node agent is the one process of
ours on each machine that takes part; it starts that machine's share of the run, watches it, and ends
it when told to, or when the launcher is no longer heard. The same messages travel through a pipe
(this machine), through ssh's or srun's standard input and output, and through TLS (``muster join``).

Every message is one JSON object with its ``kind``. Fields that are not known are ignored, so that a
newer side can add some; a kind that is not known, or a wrong type, is an error. On a pipe a message is
cut into lines of at most ``LINE_LIMIT`` characters (srun breaks longer ones): ``+`` and a piece, or
``=`` and the last piece. See docs/wire-protocol.md.
"""

import json
from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

import msgspec

from torchmuster.launch.hangs.heartbeat import Heartbeat, Integer

PROTOCOL = 2
LINE_LIMIT = 900
# A message is small; whoever sends more than this is not one of us.
MESSAGE_LIMIT = 4 * 2**20
_ERROR_LIMIT = 200

# It names processes to be killed, so an empty one would mean all of them; and it is written to pipes
# line by line.
Token = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z._-]+\Z")]
ExitStatus = Annotated[int, msgspec.Meta(ge=0, le=255)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Read = TypeVar("Read")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What all messages share."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address of a machine and the interface that has it."""

    address: str
    interface: str


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine reports about itself when it joins. Unknown is None, never a guess."""

    host: str
    user: str
    pid: Integer
    system: str  # linux, darwin, win32
    machine: str  # x86_64, arm64, …
    python: str  # 3.11.7
    torch: str | None  # 2.13.0+cpu; None if it is not installed
    torchmuster: str
    cores: Integer
    clock_unix_s: float
    addresses: tuple[Address, ...]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What would run on a machine: the script, the code beside it, the installed packages."""

    script_sha256: str
    code_sha256: str  # of all Python files in the script's folder, or "" where there are too many
    code_files: Integer
    packages_sha256: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that ended badly.

    ``ago_s`` is how long before the message was sent it happened, so that clocks need not agree.
    """

    rank: Integer
    local_rank: Integer
    exit_code: Integer  # negative: the signal that ended it
    ago_s: float
    error: str = ""  # "RuntimeError: …", the last line of the traceback
    # What an error of ours says of itself, in its three parts; "" where it is another's.
    what: str = ""
    why: str = ""
    fix: str = ""
    traceback: str = ""
    last_lines: str = ""
    peak_rss_bytes: Integer | None = None
    evidence: str = ""  # what the machine knows of the cause: "the kernel killed it: out of memory"


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A finding on its way (see finding.py)."""

    name: str
    what: str
    why: str = ""
    fix: str = ""
    evidence: str = ""
    exit_code: Integer = 1


# ---- from the launcher


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    """Take devices and look at the code; nothing is started yet."""

    run_id: str
    token: Token  # in the environment of every process of the run, so that all of them can be found
    command: tuple[str, ...]  # the script and its arguments
    module: bool  # the first word of the command is a module (python -m)
    folder: str  # the working directory
    device: str  # auto, gpu, cpu
    ranks: Ranks | None  # None: one for each device
    gpu_ids: tuple[str, ...] | None = None
    share: bool = False
    wait_s: float = 0.0
    environment: dict[str, str] = {}
    logs: str | None = None  # where the ranks' logs go; None: a folder of the node agent's own
    alone: bool = True  # no other machine takes part
    lost_after_s: float | None = None  # without a sign of life, the launcher is taken for lost
    typed: tuple[str, ...] = ("run",)  # after "muster", up to the script: for what people read
    run: str | None = None  # its folder: who sees it writes there what its ranks are doing


class Listen(Message, frozen=True, kw_only=True, tag="listen"):
    """Open a port: on the first machine the one to meet at, on others one to be tried."""

    nonce: str  # what to answer to those who try the port, so that they know whom they reached
    port: Integer | None  # None: the usual one or the next that is free; 0: any
    address: str | None = None  # listen only here


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """An address and port to be tried."""

    address: str
    port: Integer


class Reach(Message, frozen=True, kw_only=True, tag="reach"):
    """Try to reach other machines at each of these."""

    nonce: str
    targets: tuple[Target, ...]
    timeout_s: float


class Start(Message, frozen=True, kw_only=True, tag="start"):
    """Start this machine's ranks."""

    attempt: Integer
    node_rank: Integer
    nodes: Integer
    first_rank: Integer
    world_size: Integer
    backend: str  # muster, c10d, etcd-v2
    endpoint: str  # HOST:PORT of the rendezvous
    address: str  # of the first machine, as all reach it
    port: Integer
    local_address: str
    interface: str | None  # None: leave the choice to the libraries (one machine)
    timeout_s: float
    max_restarts: Integer


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """End this machine's ranks: politely, and after the grace by force. Answered by ``ended``."""

    grace_s: float
    why: str


class Signal(Message, frozen=True, kw_only=True, tag="signal"):
    """Pass a signal on to the ranks (a scheduler's warning before preemption)."""

    name: str


class DumpStacks(Message, frozen=True, kw_only=True, tag="dump-stacks"):
    """Have these ranks show what they are doing: stacks, and what they wrote down of collectives."""

    ranks: tuple[Integer, ...]


class ListPackages(Message, frozen=True, kw_only=True, tag="list-packages"):
    """Ask for the list of installed packages, where their fingerprints differ."""


class StartSidecar(Message, frozen=True, kw_only=True, tag="start-sidecar"):
    """Start a program of ours beside the node agent; it ends with the node agent, or when asked."""

    program: str  # a module of torchmuster's, run as python -m
    token: Token  # of this node agent's part in the run: the program's is below it


class Relay(Message, frozen=True, kw_only=True, tag="relay"):
    """A line for the sidecar, or a line that it wrote."""

    text: str


class Alive(Message, frozen=True, kw_only=True, tag="alive"):
    """Both sides say this regularly; whoever is not heard for too long is taken for lost."""


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """The run is over for this node agent; the words are for whoever watches its terminal."""

    exit_code: ExitStatus
    words: str


# ---- from a node agent


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The first message: who is here."""

    protocol: Integer
    record: NodeRecord


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """What was asked cannot be done here, and why."""

    trouble: Trouble


class Waiting(Message, frozen=True, kw_only=True, tag="waiting"):
    """Still at it: what is being waited for (GPUs that are in use)."""

    words: str


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    """Devices are held and the code has been looked at."""

    ranks: Ranks
    devices: tuple[str, ...]
    reasons: tuple[str, ...]
    fingerprint: Fingerprint | None  # None where no other machine takes part


class Listening(Message, frozen=True, kw_only=True, tag="listening"):
    """The port is open at these addresses, best first."""

    port: Integer
    addresses: tuple[Address, ...]
    reason: str  # why this port


class ReachResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one try went."""

    target: Target
    problem: str  # "" if reached; else a word: timeout, refused, unreachable, no-route, impostor
    seconds: float
    local: Address | None = None  # our own end of the connection


class Reached(Message, frozen=True, kw_only=True, tag="reached"):
    """How every try went."""

    results: tuple[ReachResult, ...]


class Started(Message, frozen=True, kw_only=True, tag="started"):
    """The ranks are being started."""

    attempt: Integer
    pid: Integer


class Output(Message, frozen=True, kw_only=True, tag="output"):
    """Whole lines that a rank wrote."""

    rank: Integer
    text: str


class Heartbeats(Message, frozen=True, kw_only=True, tag="heartbeats"):
    """What this machine's ranks are doing, every two seconds."""

    attempt: Integer
    heartbeats: tuple[Heartbeat, ...]
    kept: bool = False  # the machine has written it into the run's folder itself


class Evidence(Message, frozen=True, kw_only=True, tag="evidence"):
    """A file that shows what a rank is doing."""

    rank: Integer
    name: str  # stacks.txt, flight.json
    text: str


class StackDump(Message, frozen=True, kw_only=True, tag="stack-dump"):
    """All that could be found out about this machine's ranks has been sent."""


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """None of this machine's processes is alive any more."""

    attempt: Integer
    good: bool
    failures: tuple[Failure, ...] = ()
    finished: tuple[Integer, ...] = ()  # where some failed: the ranks whose script had ended well
    words: str = ""  # of the agent itself, where it and not a rank failed


class Packages(Message, frozen=True, kw_only=True, tag="packages"):
    """Name and version of every installed package."""

    packages: dict[str, str]


class SidecarStarted(Message, frozen=True, kw_only=True, tag="sidecar-started"):
    """The program was started."""

    pid: Integer


class SidecarEnded(Message, frozen=True, kw_only=True, tag="sidecar-ended"):
    """the sidecar has ended."""

    exit_code: Integer | None  # negative: the signal that ended it; None: not known
    words: str = ""  # its last words on standard error


ToAgent = Annotated[
    Prepare
    | Listen
    | Reach
    | Start
    | Stop
    | Signal
    | DumpStacks
    | ListPackages
    | StartSidecar
    | Relay
    | Alive
    | Leave,
    "to a node agent",
]
FromAgent = Annotated[
    Hello
    | Refused
    | Waiting
    | Prepared
    | Listening
    | Reached
    | Started
    | Output
    | Heartbeats
    | Evidence
    | StackDump
    | Ended
    | Packages
    | SidecarStarted
    | Relay
    | SidecarEnded
    | Alive,
    "from a node agent",
]

_encode = msgspec.json.Encoder().encode
_decode_to_agent = msgspec.json.Decoder(ToAgent).decode
_decode_from_agent = msgspec.json.Decoder(FromAgent).decode


class UnreadableMessage(ValueError):
    """Something that is not a message of this protocol."""


def read_with(decode: Callable[[bytes], Read], data: bytes) -> Read:
    """Decode bytes of another machine; raises ``Garbled`` whatever is wrong with them.

    Decoders raise more than their own errors: ``RecursionError`` for deep nesting, ``UnicodeDecodeError``.
    """
    try:
        return decode(data)
    except Exception as error:
        raise UnreadableMessage(str(error)[:_ERROR_LIMIT] or type(error).__name__) from error


def encode(message: Message) -> bytes:
    """Return a message as JSON, without a line end."""
    return _encode(message)


def decode_to_agent(data: bytes) -> ToAgent:
    """Read a message of the launcher's."""
    message: ToAgent = read_with(_decode_to_agent, data)
    return message


def decode_from_agent(data: bytes) -> FromAgent:
    """Read a message of a node agent's."""
    message: FromAgent = read_with(_decode_from_agent, data)
    return message


def to_lines(message: Message) -> bytes:
    """Return a message as lines for a pipe."""
    data = encode(message)
    if not data.isascii():  # srun breaks lines by bytes, which would cut a letter in two
        data = json.dumps(json.loads(data)).encode("ascii")
    return b"".join(_pieces(data))


def _pieces(data: bytes) -> Iterator[bytes]:
    last = max(0, len(data) - 1) // LINE_LIMIT
    for number in range(last + 1):
        mark = b"=" if number == last else b"+"
        yield mark + data[number * LINE_LIMIT : (number + 1) * LINE_LIMIT] + b"\n"


class FrameAssembler:
    """Puts the lines of a pipe together again."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, line: bytes) -> bytes | None:
        """Take one line; return a whole message's JSON once its last piece is there."""
        mark, piece = line[:1], line[1:].rstrip(b"\r\n")
        self._size += len(piece)
        if mark not in (b"+", b"=") or self._size > MESSAGE_LIMIT:
            raise UnreadableMessage(line[:200].decode(errors="replace").strip())
        self._pieces.append(piece)
        if mark == b"+":
            return None
        whole = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        return whole
