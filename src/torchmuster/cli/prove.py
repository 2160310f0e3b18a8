"""``muster prove``: show that a training script repeats, resumes and scales correctly."""

import argparse
import sys
from pathlib import Path

from torchmuster.cli import output, parsers
from torchmuster.cli.config import add_setting_flags
from torchmuster.cli.job_flags import add_resume_flag, named_variables
from torchmuster.cli.scripts import script_from
from torchmuster.cli.training_command import device_of_ranks, settings_file, training_command
from torchmuster.errors import ExitCode, Impossible
from torchmuster.prove.explanations import kinds
from torchmuster.prove.proof import PROPERTIES, Proof, prove_script
from torchmuster.prove.trials import STOPS, ProofRequest
from torchmuster.units import plural

_USUAL_STEPS = 20
_MOST_STEPS = 200
_USUAL_RANKS = 2
_FEWEST_STEPS = 4
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster prove``."""
    parser.usage = "muster prove [options] config.yaml | script.py [the script's own arguments]"
    parser.description = (
        f"{parser.description}\nRuns an unmodified script several times for a few steps: twice from its start, stopped "
        "and\nresumed, and on other numbers of ranks. Names the first thing that differs.\nEach run works in a "
        "copy of this folder. Writes elsewhere are refused: by the kernel (Landlock, Linux 5.19), else only those of Python."
    )
    parsers.show_examples(
        parser,
        [
            "muster prove train.py                         two ranks, 20 steps, on the CPU or on GPUs",
            "muster prove --resume-with '--resume {path}' train.py --save_every 5",
            "muster prove --ranks 1,2,4 --batch-arg batch_size train.py --batch_size 4",
            "muster prove config.yaml                      a settings file of muster train",
            "muster prove --json train.py                  for CI: exit code 1 if a property does not hold",
        ],
    )
    add_setting_flags(parser)
    what = parser.add_argument_group("trials")
    what.add_argument(
        "--steps",
        type=_prove_steps,
        metavar="N",
        help=f"optimizer steps of each run (default: {_USUAL_STEPS}, or up to {_MOST_STEPS} until a checkpoint was "
        "saved); two epochs or more test most",
    )
    what.add_argument(
        "--ranks",
        type=_rank_counts,
        metavar="N,…",
        help="numbers of ranks (default: 2); runs are stopped and resumed with 2 of them, or with the largest number",
    )
    what.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="device of the ranks (default: GPUs if there are any, else the CPU)",
    )
    add_resume_flag(what)
    what.add_argument(
        "--stops",
        type=_stops,
        default=STOPS,
        metavar="NAME,…",
        help=f"how to stop runs (default: {','.join(STOPS)}): SIGKILL of all ranks, of one, SIGTERM, SIGKILL during a save",
    )
    what.add_argument(
        "--outputs",
        action="append",
        default=[],
        metavar="PATH",
        help="a folder or file that the script writes; it starts empty in each run (default: folders in arguments such as "
        "--output_dir)",
    )
    what.add_argument(
        "--batch-arg",
        default="",
        metavar="NAME",
        help="the script's argument for the batch per rank; needed to compare --ranks",
    )
    what.add_argument(
        "--accumulation-arg",
        default="",
        metavar="NAME",
        help="the script's argument for gradient accumulation; compares half the batch with twice the accumulation",
    )
    what.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable on all ranks; NAME alone forwards its current value",
    )
    then = parser.add_argument_group("results")
    then.add_argument(
        "--only",
        type=_properties,
        default=PROPERTIES,
        metavar="PROPERTY,…",
        help=f"test only these: {', '.join(PROPERTIES)}",
    )
    then.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=kinds(),
        metavar="DIFFERENCE",
        help="accept a difference, such as same-data with tensor parallelism",
    )
    then.add_argument(
        "--out",
        type=Path,
        default=Path("prove"),
        metavar="DIR",
        help="folder for reports (default: prove)",
    )
    parsers.add_json_flag(then)
    parser.add_argument("stray", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run_prove, command=None)


def _prove_steps(text: str) -> int:
    if not text.isdecimal() or int(text) < _FEWEST_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {_FEWEST_STEPS}")
    return int(text)


def _rank_counts(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= 64 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 1,2,4")
    return tuple(sorted({int(word) for word in words}))


def _properties(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    unknown = [word for word in words if word not in PROPERTIES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a property; write for example {','.join(PROPERTIES[:2])}"
        )
    return words


def _stops(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    unknown = [word for word in words if word not in STOPS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a stop; choose among {','.join(STOPS)}"
        )
    return words


def _run_prove(options: argparse.Namespace) -> int:
    request = _proof_request(options)
    where = "on the CPU" if request.device == "cpu" else "on GPUs"
    output.say(
        f"muster: {plural(request.ranks, 'rank')} {where}, {request.steps} steps; runs work in copies"
    )
    proof = prove_script(request, properties=options.only, allowed=options.allow, say=output.say)
    _show_proof(options, proof, Path(request.into))
    return ExitCode.FAILED if proof.failed else ExitCode.GOOD


def _proof_request(options: argparse.Namespace) -> ProofRequest:
    device, gpus = device_of_ranks(options)
    counts = options.ranks or (_USUAL_RANKS,)
    ranks = _USUAL_RANKS if _USUAL_RANKS in counts else max(counts)
    if device == "gpu" and max(counts) > gpus:
        raise Impossible(
            f"{max(counts)} ranks on GPUs requested, but there are not enough GPUs",
            why=f"{gpus} are visible, and each GPU gets one rank",
            fix=f"--ranks {gpus}, or --device cpu",
        )
    config = settings_file(options)
    if config is None:
        script = script_from(options, Path.cwd())
        command, module = script.command, script.module
    else:
        command = training_command(
            options, config, device, steps=options.steps or _USUAL_STEPS, doing="a proof up to"
        )
        module = True
    return ProofRequest(
        command=command,
        module=module,
        with_run_folder=config is not None,
        folder=str(Path.cwd()),
        into=str(output.new_folder(options.out).absolute()),
        steps=options.steps or _USUAL_STEPS,
        most_steps=0 if options.steps or config is not None else _MOST_STEPS,
        ranks=ranks,
        other_ranks=tuple(count for count in counts if count != ranks),
        device=device,
        resume_with=options.resume_with,
        outputs=tuple(options.outputs),
        batch_argument=options.batch_arg,
        accumulation_argument=options.accumulation_arg,
        stops=options.stops,
        environment=named_variables(options.env),
    )


def _show_proof(options: argparse.Namespace, proof: Proof, folder: Path) -> None:
    from torchmuster.prove import report
    from torchmuster.runfolder import write_atomically

    write_atomically(folder / "report.html", report.proof_page(proof))
    if options.json:
        output.print_json(report.proof_json(proof, folder))
        return
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    width = min(output.width(), _WIDTH)
    output.print_coloured(
        report.proof_screen(proof, shown, width=width, colour=output.wants_colour(sys.stdout))
    )
