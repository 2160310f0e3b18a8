"""What the kernel and the launcher beside it say to each other, a line of JSON each."""

import msgspec

from torchmuster.finding import Finding
from torchmuster.launch.job import JobSpec


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to launch: the first line. ``guests`` are machines that join by a code."""

    spec: JobSpec
    run: str
    guests: int = 0


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """Send SIGINT to every rank."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """End the ranks; a second time, at once."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """What the launcher says of its own."""

    text: str


class Code(msgspec.Struct, frozen=True, tag="code"):
    """The line to paste on another machine."""

    machine: int
    line: str


class Found(msgspec.Struct, frozen=True, tag="found"):
    """What the launcher found: a hang, or why the ranks ended."""

    findings: tuple[Finding, ...]


class World(msgspec.Struct, frozen=True, tag="world"):
    """How many ranks there are."""

    size: int


class Printed(msgspec.Struct, frozen=True, tag="printed"):
    """Lines that a rank wrote to its log: libraries and programs do, cells do not."""

    rank: int
    text: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """None of the ranks is left."""

    exit_code: int


ToLauncher = Interrupt | End
FromLauncher = Said | Code | Found | World | Printed | Ended
