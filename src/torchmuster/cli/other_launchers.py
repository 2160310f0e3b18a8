"""Commands and flags of other launchers in ``muster run``: torchrun and python.

Everything is translated into flags of ``muster run`` and a script, one line on stderr for each flag.
The flags are listed in :mod:`torchmuster.cli.torchrun_flags`.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.cli import output, scripts
from torchmuster.cli.torchrun_flags import TORCHRUN_FLAGS, TorchrunFlag, flag_named
from torchmuster.config.fields import suggest_name
from torchmuster.devices.visibility import STAGES
from torchmuster.errors import Impossible
from torchmuster.launch.schedulers.node_group import NODE_RANK
from torchmuster.redaction import harmless, printable, redact_command, redact_mapping

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python[\d.]*")
_VISIBILITY = {name for stages in STAGES.values() for stage in stages for name in stage}
# Options of Python, and the variables that do the same in each rank; ranks are always unbuffered.
_PYTHON_OPTIONS = {"-u": "", "-B": "PYTHONDONTWRITEBYTECODE=1", "-O": "PYTHONOPTIMIZE=1"}
_LAUNCH = "torch.distributed.launch"  # torchrun's predecessor
_MODULES = {
    "torch.distributed.run": ("torchrun",),
    "torch.distributed.launch": (_LAUNCH,),
    "accelerate.commands.launch": ("accelerate",),
    "accelerate.commands.accelerate_cli": ("accelerate",),
}
# Commands that start scripts in ways that Muster does not translate, and what to type instead.
_OTHERS = {
    "accelerate": "muster run --ranks 2 train.py …  # Accelerator() reads the rank from the environment",
    "accelerate-launch": "muster run --ranks 2 train.py …  # Accelerator() reads the rank from the environment",
    "deepspeed": "muster run --num-gpus 2 train.py …  # DeepSpeed reads the rank from the environment",
    "mpirun": "muster run --hosts a,b train.py …",
    "mpiexec": "muster run --hosts a,b train.py …",
    "horovodrun": "muster run --hosts a,b train.py …",
    "srun": "in the Slurm job, without srun: muster run train.py …  # starts ranks on all its nodes",
    "sbatch": "muster run --slurm --nodes 2 train.py …",
    "nohup": "muster run --detach train.py …",
    "fabric": "muster run train.py …  # Fabric() reads the rank from the environment",
    "bash": "in the shell script, write muster run in front of torchrun or python",
    "sh": "in the shell script, write muster run in front of torchrun or python",
    **{
        tool: f"{tool} run muster run train.py …"
        for tool in ("uv", "poetry", "pipenv", "pdm", "hatch", "conda", "micromamba")
    },
}


@dataclass
class Pasted:
    """A command line as it is taken apart: flags of muster, flags of torchrun, and the script."""

    words: list[str]
    given: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    launcher: str = ""
    gpus: list[str] = field(default_factory=list)  # CUDA_VISIBLE_DEVICES=…
    environment: MutableMapping[str, str] = field(default_factory=dict)  # of this process

    def take(self, flag: TorchrunFlag, value: str, label: str) -> None:
        """Take a flag of torchrun; the first one counts."""
        if flag.name not in self.given:
            self.given[flag.name], self.labels[flag.name] = value, label.rstrip()

    def add(self, words: Sequence[str], label: str) -> None:
        """Add flags of muster before those that the user typed, which override them."""
        typed = {word.partition("=")[0] for word in self.words}
        if words[0] in typed and words[0] != "--env":
            self.lines.append(f"{label}: no effect: {words[0]} is given")
            return
        self.words[1:1] = words
        if label.replace("_", "-") != (shown := printable(words)):
            self.lines.append(f"{label}: {shown}")


def is_launcher(word: str) -> bool:
    """Return whether a command of another launcher begins with this argument."""
    name = Path(word).name
    known = name in ("torchrun", "env") or name in _OTHERS
    return known or bool(_PYTHON.fullmatch(name) or _ASSIGNMENT.fullmatch(word))


def muster_words(
    words: Sequence[str], environment: MutableMapping[str, str], folder: Path
) -> tuple[list[str], list[str] | None]:
    """Return the flags of ``muster run`` and the script of a command line; print what changed.

    A choice of GPUs, such as ``CUDA_VISIBLE_DEVICES=0,1 torchrun …``, is put into ``environment``.
    """
    takes_text = {flag.name for flag in TORCHRUN_FLAGS if flag.value}
    own, command = scripts.split_off(list(words), takes_text=takes_text, starts=is_launcher)
    verbatim = len(own) < len(words) and words[len(own)] == "--"
    pasted = Pasted(words=[], environment=environment)
    pasted.words = _without_torchruns(own, pasted)
    if command and not (verbatim and (folder / command[0]).exists()):
        command = _unwrapped(pasted, command, folder)
    elif "--no-python" in pasted.given:
        command = _program(command or [], folder)
    # A scheduler that describes the nodes to Muster may describe them to torchrun as well (Kubeflow Trainer).
    for flag in () if NODE_RANK in environment else TORCHRUN_FLAGS:
        value = environment.get(flag.variable)
        if value is not None and (flag.value or value != "0"):
            pasted.take(flag, value, f"{flag.variable}={value}")
    _translate(pasted)
    if command and not verbatim:
        command, note = scripts.without_musters_flags(command, pasted.words, folder)
        pasted.lines += [note] if note else []
    if pasted.launcher == "torchrun":
        typed = [*pasted.gpus, "muster", *pasted.words, *(command or [])]
        pasted.lines.append(f"the same command: {harmless(shlex.join(redact_command(typed)))}")
    for line in pasted.lines:
        output.say(f"muster: {line}")
    return pasted.words, command


def hint_for(flag: str, known: Collection[str], *, takes_torchruns: bool) -> str:
    """Return a hint for an unknown flag: the nearest one, or which launcher has it."""
    torchruns = [one.name for one in TORCHRUN_FLAGS] if takes_torchruns else []
    return _suggest_flag(flag, [*known, *torchruns])


def _suggest_flag(flag: str, known: Collection[str]) -> str:
    """Return the nearest flag; the dashes, which all have, do not count."""
    names = [one[2:] for one in known if one.startswith("--")]
    nearest = suggest_name(flag.lstrip("-"), names)
    return nearest.replace("did you mean ", "did you mean --")


def _without_torchruns(words: Sequence[str], pasted: Pasted) -> list[str]:
    """Take torchrun's flags; return those of muster, with hyphens."""
    kept = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        flag = flag_named(name)
        if flag is None:
            kept.append(f"{name.replace('_', '-')}{equals}{value}" if word[:2] == "--" else word)
            continue
        if flag.value and not equals:
            value = _value_of(name, left)
        pasted.take(flag, value, f"{name} {value}")
    return kept


def _value_of(name: str, left: Iterator[str]) -> str:
    value = next(left, None)
    if value is None:
        raise Impossible(f"{name} needs a value", fix=f"{name} VALUE")
    return value


def _translate(pasted: Pasted) -> None:
    """Add the flags of muster that those of torchrun become."""
    for flag in TORCHRUN_FLAGS:
        if flag.name not in pasted.given:
            continue
        label = pasted.labels[flag.name]
        outcome = flag.apply(pasted.given[flag.name], pasted.given)
        if outcome.note:
            pasted.lines.append(f"{label}: {outcome.note}")
        if outcome.words:
            pasted.add(outcome.words, label)
    typed = {word.partition("=")[0] for word in pasted.words}
    counts = {"--ranks", "--num-gpus", "--gpu-ids", "--device"}
    if pasted.launcher and "--nproc-per-node" not in pasted.given and not typed & counts:
        pasted.add(("--ranks", "1"), f"{pasted.launcher} without --nproc-per-node")


def _unwrapped(pasted: Pasted, command: Sequence[str], folder: Path) -> list[str]:
    """Take launchers off the front of a command, until a script is left."""
    left = list(command)
    no_python = "--no-python" in pasted.given
    while left and left[0] != "-m" and ("/" in left[0] or not (folder / left[0]).is_file()):
        name = Path(left[0]).name
        if assigned := _ASSIGNMENT.fullmatch(left[0]):
            _take_variable(pasted, assigned[1], assigned[2])
            left = left[1:]
        elif name == "env":
            left = left[1:]
        elif name in ("torchrun", _LAUNCH):
            left = _take_torchrun(pasted, left[1:], legacy=name == _LAUNCH)
            no_python = "--no-python" in pasted.given
        elif _PYTHON.fullmatch(name):
            left = _take_python(pasted, left)
            no_python = False
        elif name in _OTHERS:
            raise Impossible(
                f"muster run cannot start {name}",
                why=f"{name} itself starts the ranks, or sets up their environment",
                fix=_OTHERS[name],
            )
        else:
            break
    return _program(left, folder) if no_python else left


def _take_variable(pasted: Pasted, name: str, value: str) -> None:
    if name in _VISIBILITY:
        pasted.environment[name] = value
        pasted.gpus.append(f"{name}={value}")
        pasted.lines.append(f"{name}={value}: other GPUs of this host are not used")
        return
    flag = flag_named(f"--{name.removeprefix('PET_').lower()}") if name[:4] == "PET_" else None
    shown = str(redact_mapping({name: value})[name])
    if flag is not None:
        pasted.take(flag, value, f"{name}={shown}")
        return
    pasted.add(("--env", f"{name}={value}"), f"{name}={shown}")


def _take_torchrun(pasted: Pasted, words: Sequence[str], *, legacy: bool) -> list[str]:
    """Take torchrun's flags; return its script, after ``-m`` if it is a module."""
    pasted.launcher = "torchrun"
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "--":
        name, equals, value = left.pop(0).partition("=")
        if name[:2] != "--" and len(name) > 2:  # -t3
            name, equals, value = name[:2], "=", name[2:]
        flag = flag_named(name, abbreviated=True)
        if name in ("-h", "--help"):
            raise Impossible(
                "torchrun --help starts nothing", fix="torchrun --help, or: muster run --help"
            )
        if flag is None:
            raise Impossible(
                f"torchrun has no flag {name}",
                fix=_suggest_flag(name.replace("_", "-"), [one.name for one in TORCHRUN_FLAGS])
                or "torchrun --help  # lists its flags; the script's own come after the script",
            )
        if flag.value and not equals:
            value = _value_of(name, iter(left[:1]))
            left = left[1:]
        pasted.take(flag, value, f"{name} {value}")
    if left[:1] == ["--"]:
        left = left[1:]
    if not left:
        _translate(pasted)  # what is wrong with the flags comes first
        raise _no_script("torchrun")
    if legacy and "--use-env" not in pasted.given:
        raise Impossible(
            "torch.distributed.launch without --use-env passes --local-rank to the script",
            why="Muster, like torchrun, sets the variable LOCAL_RANK instead",
            fix='read int(os.environ["LOCAL_RANK"]) in the script, and add --use-env',
        )
    return ["-m", *left] if "--module" in pasted.given else left


def _take_python(pasted: Pasted, words: Sequence[str]) -> list[str]:
    """Take the interpreter and its options; return the script, or the launcher that it runs."""
    left = list(words[1:])
    _compare_interpreters(pasted, words[0])
    while left and left[0].startswith("-") and left[0] not in ("-m", "-c", "-"):
        option = left.pop(0)
        if option == "-W" and left:
            variable = f"PYTHONWARNINGS={left.pop(0)}"
        elif option in _PYTHON_OPTIONS:
            variable = _PYTHON_OPTIONS[option]
        else:
            raise Impossible(
                f"muster run cannot pass {option} to Python",
                why="Muster starts the Python of each rank itself",
                fix="leave it out, or set the variable that does the same: --env PYTHON…=…",
            )
        if variable:
            pasted.add(("--env", variable), f"python {option}")
    if not left or left[0] in ("-c", "-"):
        raise Impossible("there is no script or module after python", fix="muster run train.py")
    if left[0] == "-m" and left[1:2] and left[1] in _MODULES:
        return [*_MODULES[left[1]], *left[2:]]
    return left


def _compare_interpreters(pasted: Pasted, word: str) -> None:
    found = shutil.which(word)
    if found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve():
        return
    if "/" in word:
        raise Impossible(
            f"muster run starts ranks with {sys.executable}, not with {word}",
            why="ranks run with the Python that torchmuster is installed in",
            fix=f"{word} -m pip install torchmuster, then {word} -m torchmuster run …",
        )
    pasted.lines.append(f"{word}: the ranks run with {sys.executable}")


def _program(command: Sequence[str], folder: Path) -> list[str]:
    """Return the program that torchrun would start without Python; Python code becomes a script."""
    here = folder / command[0] if command else folder
    program = str(here) if here.is_file() else shutil.which(here.name) or ""
    try:
        with Path(program).open("rb") as stream:
            first = stream.readline(200)
    except OSError:
        raise Impossible(
            f"--no-python {shlex.join(command[:1])}".rstrip() + ": there is no such program",
            fix="muster run train.py",
        ) from None
    if program.endswith(".py") or (first.startswith(b"#!") and b"python" in first):
        return [program, *command[1:]]
    return [scripts.NO_PYTHON, program, *command[1:]]


def _no_script(launcher: str) -> Impossible:
    return Impossible(
        f"{launcher}: there is no script to run", fix=f"muster run {launcher} train.py"
    )
