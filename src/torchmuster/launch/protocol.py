"""The messages between the launcher and the node agents: typed messages as lines of JSON.

The launcher is the process of ``muster run``. A node agent is torchmuster's process on each host of a run;
it starts that host's ranks, monitors them, and stops them on request or when the launcher's heartbeats
stop. The same messages are sent through a pipe (the local host), through ssh's standard input and
output, and through TLS (nodes of a Slurm job, ``muster join``).

Every message is one JSON object with its ``kind``. Unknown fields are ignored, so that a newer version can
add some; an unknown kind or a wrong type is an error. On a pipe a message is a line that begins with ``=``. See
docs/dev/wire-protocol.md.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from torchmuster.launch.heartbeat import Heartbeat, Integer

PROTOCOL = 1
# Messages are small; a larger one is not from torchmuster.
MESSAGE_LIMIT = 4 * 2**20
RECORDED = "metrics.jsonl"  # the file with what rank 0 recorded of its script
_ERROR_LIMIT = 200

# It selects processes to kill, so an empty one would select all of them; and it is written to pipes
# line by line.
Token = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z._-]+\Z")]
ExitStatus = Annotated[int, msgspec.Meta(ge=0, le=255)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Read = TypeVar("Read")
_encode = msgspec.json.Encoder().encode


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of all messages."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address of a host and its network interface."""

    address: str
    interface: str


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a host reports about itself when it joins. Unknown is None, never a guess."""

    host: str
    system: str  # linux, darwin, win32
    python: str  # 3.11.7
    torch: str | None  # 2.13.0+cpu; None if it is not installed
    torchmuster: str
    cores: Integer
    clock_unix_s: float
    addresses: tuple[Address, ...]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What would run on a host: the script and the code next to it."""

    script_sha256: str
    code_sha256: str  # of the Python files in the script's folder


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that failed.

    ``ago_s`` is the time between the failure and the message, so that clocks need not agree.
    """

    rank: Integer
    exit_code: Integer  # negative: the signal that killed it
    ago_s: float
    error: str = ""  # "RuntimeError: …", the last line of the traceback
    # The three parts of a torchmuster error; "" for other errors.
    what: str = ""
    why: str = ""
    fix: str = ""
    traceback: str = ""
    last_lines: str = ""
    evidence: str = ""  # what the host knows about the cause: "the kernel killed it: out of memory"


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A finding inside a message (see finding.py)."""

    name: str
    what: str
    why: str = ""
    fix: str = ""
    evidence: str = ""
    exit_code: Integer = 1


# ---- from the launcher


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    """Lease devices and fingerprint the code; nothing is started yet."""

    run_id: str
    token: Token  # in the environment of every process of the run, so that all of them can be found
    command: tuple[str, ...]  # the script and its arguments
    module: bool  # the first argument of the command is a module (python -m)
    program: bool = False  # the command is a program that is no Python script
    folder: str  # the working directory
    device: str  # auto, gpu, cpu
    ranks: Ranks | None  # None: one for each device
    gpu_ids: tuple[str, ...] | None = None
    share: bool = False
    wait_s: float = 0.0
    environment: dict[str, str] = {}
    alone: bool = True  # this is the only host
    lost_after_s: float | None = None  # without a heartbeat, the launcher is declared lost
    typed: tuple[str, ...] = ("run",)  # arguments after "muster", up to the script: for messages
    run: str | None = None  # the run folder: each host writes its logs and heartbeats there


class Listen(Message, frozen=True, kw_only=True, tag="listen"):
    """Open a port: on the first host for the rendezvous, on others to test reachability."""

    nonce: str  # the answer to clients that test the port, so that they can identify this host
    port: Integer | None  # None: the default or the next free one; 0: any
    address: str | None = None  # listen only here


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """An address and port to test."""

    address: str
    port: Integer


class Reach(Message, frozen=True, kw_only=True, tag="reach"):
    """Try to connect to other hosts at each of these targets."""

    nonce: str
    targets: tuple[Target, ...]
    timeout_s: float


class Start(Message, frozen=True, kw_only=True, tag="start"):
    """Start this host's ranks."""

    attempt: Integer
    node_rank: Integer
    nodes: Integer
    first_rank: Integer
    world_size: Integer
    address: str  # of the first host, reachable from all hosts
    port: Integer
    interface: str | None  # None: the libraries choose (single host)
    max_restarts: Integer
    first_step: Integer = 0  # the step that the user's script resumes from, if known


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """Stop this host's ranks gracefully, and kill them after the grace period. Answered by ``ended`` of this attempt."""

    attempt: Integer
    grace_s: float
    why: str


class Signal(Message, frozen=True, kw_only=True, tag="signal"):
    """Forward a signal to the ranks (a scheduler's warning before preemption)."""

    name: str


class DumpStacks(Message, frozen=True, kw_only=True, tag="dump-stacks"):
    """Request stack dumps and flight recorder dumps from these ranks."""

    ranks: tuple[Integer, ...]


class Relay(Message, frozen=True, kw_only=True, tag="relay", omit_defaults=True):
    """A line for the sidecar process next to the node agent, or a line that it wrote; at its end its last output on standard error.

    The first one has the token of this node agent's part of the run, which the sidecar's token extends.
    """

    text: str = ""
    token: Token | None = None
    is_last: bool = False  # the sidecar has exited
    exit_code: Integer | None = None  # negative: the signal that killed it; None: unknown


class Alive(Message, frozen=True, kw_only=True, tag="alive", omit_defaults=True):
    """Heartbeat of both sides; a side without heartbeats for too long is declared lost."""

    waiting_for: str = ""  # what delays the answer of a host: GPUs that are in use


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """The run is over for this node agent; ``text`` is printed on its terminal."""

    exit_code: ExitStatus
    text: str


# ---- from a node agent


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The first message: identifies the host."""

    protocol: Integer
    record: NodeRecord


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    """Devices are leased and the code is fingerprinted."""

    ranks: Ranks
    devices: tuple[str, ...]
    fingerprint: Fingerprint | None  # None if this is the only host
    logs: str = ""  # the folder of the ranks' logs on this host
    sees_run: bool = False  # the run folder is on this host's disk, or on one that it shares


class Listening(Message, frozen=True, kw_only=True, tag="listening"):
    """The port is open at these addresses, best first."""

    port: Integer
    addresses: tuple[Address, ...]
    reason: str  # why this port


class ReachResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one connection test."""

    target: Target
    problem: str  # "" if reached; else one of: timeout, refused, unreachable, no-route, impostor
    seconds: float
    local: Address | None = None  # our own end of the connection


class Reached(Message, frozen=True, kw_only=True, tag="reached"):
    """The results of all connection tests."""

    results: tuple[ReachResult, ...]


class Done(Message, frozen=True, kw_only=True, tag="done", omit_defaults=True):
    """A request that needs no other answer was carried out, or any request cannot be, and why."""

    dumped_stacks: bool = False
    trouble: Trouble | None = None


class Output(Message, frozen=True, kw_only=True, tag="output", omit_defaults=True):
    """Whole lines that a rank wrote, or a file of it: its stacks, its flight recorder, what it recorded of a script."""

    rank: Integer
    text: str
    file: str = ""  # stacks.txt, flight.json, metrics.jsonl; "": its standard output and error


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that were asked to stop and are still alive; they are killed in ``left_s`` seconds.

    ``stop_signal``: the signal by which this node agent, and not the launcher, was asked to stop; "" if a rank failed.
    """

    ranks: tuple[Integer, ...]
    left_s: float
    stop_signal: str = ""


class Heartbeats(Message, frozen=True, kw_only=True, tag="heartbeats"):
    """Heartbeats of this host's ranks, sent every two seconds."""

    attempt: Integer
    heartbeats: tuple[Heartbeat, ...]
    stopping: Stopping | None = None


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """All processes of the run on this host have exited."""

    attempt: Integer
    good: bool
    failures: tuple[Failure, ...] = ()
    finished: tuple[Integer, ...] = ()  # if some failed: the ranks whose script had finished
    text: str = ""  # error of the agent itself, if it and not a rank failed
    killed: tuple[
        Integer, ...
    ] = ()  # the ranks that had not stopped when the grace period was over
    stop_signal: str = (
        ""  # the signal by which this node agent, and not the launcher, was asked to stop
    )


ToAgent = Annotated[
    Prepare | Listen | Reach | Start | Stop | Signal | DumpStacks | Relay | Alive | Leave,
    "to a node agent",
]
FromAgent = Annotated[
    Hello | Prepared | Listening | Reached | Done | Output | Heartbeats | Ended | Relay | Alive,
    "from a node agent",
]

_decode_to_agent = msgspec.json.Decoder(ToAgent).decode
_decode_from_agent = msgspec.json.Decoder(FromAgent).decode


class UnreadableMessage(ValueError):
    """Raised for data that is not a message of this protocol."""


def read_with(decode: Callable[[bytes], Read], data: bytes) -> Read:
    """Decode bytes from another host; raise ``UnreadableMessage`` for any error.

    Decoders raise more than their own errors: ``RecursionError`` for deep nesting, ``UnicodeDecodeError``.
    """
    try:
        return decode(data)
    except Exception as error:
        raise UnreadableMessage(str(error)[:_ERROR_LIMIT] or type(error).__name__) from error


def encode(message: Message) -> bytes:
    """Return a message as JSON, without a newline."""
    return _encode(message)


def decode_to_agent(data: bytes) -> ToAgent:
    """Decode a message from the launcher."""
    message: ToAgent = read_with(_decode_to_agent, data)
    return message


def decode_from_agent(data: bytes) -> FromAgent:
    """Decode a message from a node agent."""
    message: FromAgent = read_with(_decode_from_agent, data)
    return message


def to_line(message: Message) -> bytes:
    """Return a message as a line for a pipe: ``=`` and its JSON."""
    return b"=" + encode(message) + b"\n"


def from_line(line: bytes) -> bytes:
    """Return the JSON of the message in a line."""
    if not line.startswith(b"=") or len(line) > MESSAGE_LIMIT:
        raise UnreadableMessage(line[:_ERROR_LIMIT].decode(errors="replace").strip())
    return line[1:].rstrip(b"\r\n")
