"""``muster prove``: show that a training script repeats, resumes and scales correctly."""

import sys
from dataclasses import dataclass
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.launch_options import ResumeOptions
from torchmuster.cli.options import JsonOptions, command, flag
from torchmuster.cli.training_command import TrainedOptions, device_of_ranks, rank_command
from torchmuster.errors import ExitCode, Impossible
from torchmuster.prove import report
from torchmuster.prove.explanations import kinds
from torchmuster.prove.proof import CHECKS, PROPERTIES, Proof, prove_script
from torchmuster.prove.records import ProofRequest
from torchmuster.prove.report import DEVICES
from torchmuster.runfolder import write_atomically
from torchmuster.units import plural

USUAL_STEPS = 20
MOST_STEPS = 200
USUAL_RANKS = 2
FEWEST_STEPS = 4
WIDTH = 100


def steps_number(text: str) -> int:
    """Parse a number of optimizer steps."""
    if not text.isdecimal() or int(text) < FEWEST_STEPS:
        raise ValueError(f"{text!r} is not a number of at least {FEWEST_STEPS}")
    return int(text)


def rank_counts(text: str) -> tuple[int, ...]:
    """Parse a comma list of numbers of ranks."""
    values = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= 64 for word in values):
        raise ValueError(f"{text!r} is not a list of numbers, such as 1,2,4")
    return tuple(sorted({int(word) for word in values}))


def checks(text: str) -> tuple[str, ...]:
    """Parse a comma list of properties and single checks."""
    names = tuple(text.split(","))
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"{name!r} is not a property; choose among {','.join(CHECKS)}")
    return names


@dataclass(frozen=True, kw_only=True)
class ProveOptions(TrainedOptions, ResumeOptions, JsonOptions):
    """The flags of ``muster prove``."""

    steps: int | None = flag(
        f"optimizer steps of each run (default: {USUAL_STEPS}, or up to {MOST_STEPS} until a checkpoint was saved); "
        "two epochs or more test most",
        parse=steps_number,
        metavar="N",
    )
    ranks: tuple[int, ...] = flag(
        "numbers of ranks to compare (default: 2)",
        default=(USUAL_RANKS,),
        parse=rank_counts,
        metavar="N,…",
    )
    outputs: tuple[str, ...] = flag(
        "what the script writes (default: what --output_dir names, …)",
        default=(),
        repeated=True,
        metavar="PATH",
    )
    batch_arg: str = flag(
        "the script's argument for the batch per rank, to compare --ranks",
        default="",
        metavar="NAME",
    )
    accumulation_arg: str = flag(
        "the script's argument for accumulation, compared with the batch",
        default="",
        metavar="NAME",
    )
    only: tuple[str, ...] = flag(
        f"test only these: {', '.join(PROPERTIES)}, or one way to stop: {', '.join(CHECKS[len(PROPERTIES) :])}",
        default=PROPERTIES,
        parse=checks,
        metavar="PROPERTY,…",
    )
    allow: tuple[str, ...] = flag(
        "accept a difference, such as same-data with tensor parallelism",
        default=(),
        repeated=True,
        choices=tuple(kinds()),
        metavar="DIFFERENCE",
    )
    out: Path = flag(
        "folder for reports (default: prove)", default=Path("prove"), parse=Path, metavar="DIR"
    )


@command(
    ProveOptions,
    usage="muster prove [options] config.yaml | script.py [the script's own arguments]",
    more="""
    Runs an unmodified script several times for a few steps: twice from its start, stopped and
    resumed, and on other numbers of ranks. Names the first thing that differs.
    Each run works in a copy of this folder. The kernel refuses writes elsewhere (Landlock, Linux
    5.19); without it they are not refused, and the result says so.
    """,
    examples=[
        "muster prove train.py                         two ranks, 20 steps, on the CPU or on GPUs",
        "muster prove --resume-with '--resume {path}' train.py --save_every 5",
        "muster prove --ranks 1,2,4 --batch-arg batch_size train.py --batch_size 4",
        "muster prove config.yaml                      a settings file of muster train",
        "muster prove --json train.py                  for CI: exit code 1 if a property does not hold",
    ],
)
def run(options: ProveOptions) -> int:
    """Prove the script and return the exit code."""
    request = _proof_request(options)
    where = f"{plural(request.ranks, 'rank')} {DEVICES[request.device]}"
    output.say(f"muster: {where}, {request.steps} steps; runs work in copies")
    proof = prove_script(request, output.say)
    _show_proof(options, proof, Path(request.into))
    return ExitCode.FAILED if proof.failed else ExitCode.GOOD


def _proof_request(options: ProveOptions) -> ProofRequest:
    device, gpus = device_of_ranks(options)
    counts = options.ranks
    ranks = USUAL_RANKS if USUAL_RANKS in counts else max(counts)
    if device == "gpu" and max(counts) > gpus:
        raise Impossible(
            f"{max(counts)} ranks on GPUs requested, but there are not enough GPUs",
            why=f"{gpus} are visible, and each GPU gets one rank",
            fix=f"--ranks {gpus}, or --device cpu",
        )
    steps = options.steps or USUAL_STEPS
    command = rank_command(options, device, steps=steps, purpose="a proof up to")
    return ProofRequest(
        command=command.command,
        module=command.module,
        with_run_folder=command.is_worker,
        folder=str(Path.cwd()),
        into=str(output.new_folder(options.out).absolute()),
        ranks=ranks,
        device=device,
        steps=steps,
        most_steps=0 if options.steps or command.is_worker else MOST_STEPS,
        only=options.only,
        allowed=options.allow,
        other_ranks=tuple(count for count in counts if count != ranks),
        resume_with=options.resume_with,
        outputs=options.outputs,
        batch_argument=options.batch_arg,
        accumulation_argument=options.accumulation_arg,
    )


def _show_proof(options: ProveOptions, proof: Proof, folder: Path) -> None:
    if options.json:
        output.print_json(report.proof_json(proof, folder))
    else:
        shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        width = min(output.width(), WIDTH)
        colour = output.wants_colour(sys.stdout)
        output.print_coloured(report.proof_screen(proof, shown, width=width, colour=colour))
    write_atomically(folder / "report.html", report.proof_page(proof))
