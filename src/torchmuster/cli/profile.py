"""``muster profile``: find where training time goes, and what would make it faster."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.bench.profile.recording import WARM_UP_STEPS, ProfileRequest
from torchmuster.cli import output, parsers
from torchmuster.cli.config import add_setting_flags
from torchmuster.cli.job_flags import count
from torchmuster.cli.scripts import script_from
from torchmuster.cli.training_command import device_of_ranks, settings_file, training_command
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.units import parse_bytes

if TYPE_CHECKING:
    from torchmuster.bench.profile.advice import Advice
    from torchmuster.bench.profile.analysis import Analysis
    from torchmuster.bench.profile.changes import ChangeTrial

_USUAL_STEPS = (20, 23)
_PLAIN_STEPS = 4  # minimum number of steps timed before the profiler starts
_TRIAL_ROUNDS, _PROOF_ROUNDS = 2, 3
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster profile``."""
    parser.usage = "muster profile [options] config.yaml | script.py [the script's own arguments]"
    parser.description = (
        f"{parser.description}\nRuns the training on this machine, traces the requested steps, "
        "and stops. "
        "A script needs no\nchange. Reports where each rank's time goes, what to change, and "
        "the expected "
        "speed-up."
    )
    parsers.show_examples(
        parser,
        [
            "muster profile train.py --lr 1e-4              one rank per GPU, or one on the CPU",
            "muster profile --ranks 2 config.yaml           a settings file of muster train",
            "muster profile --verify train.py               apply the top recommendation, and measure",
            "muster profile --steps 50:53 --on-ranks 0 train.py    other steps, one rank's trace",
            "muster profile --of profile/2026-01-31-120000  report on an existing profile",
        ],
    )
    add_setting_flags(parser)
    what = parser.add_argument_group("recording")
    what.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="number of ranks (default: one per GPU, or 1 on the CPU)",
    )
    what.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="device of the ranks (default: GPUs if there are any, else the CPU)",
    )
    what.add_argument(
        "--steps",
        type=_steps,
        default=_USUAL_STEPS,
        metavar="A:B",
        help="first and last step to trace (default: 20:23); earlier steps are timed",
    )
    what.add_argument(
        "--on-ranks",
        type=_on_ranks,
        metavar="R,…",
        help="ranks whose traces are kept (default: all)",
    )
    what.add_argument(
        "--most",
        type=_profile_size,
        default=ProfileRequest.trace_most_bytes,
        metavar="SIZE",
        help="max size of a rank's uncompressed trace; above it, fewer steps are traced (default: 256MiB)",
    )
    what.add_argument("--memory", action="store_true", help="also trace memory allocations")
    then = parser.add_argument_group("analysis and output")
    then.add_argument(
        "--verify",
        action="store_true",
        help="apply the top recommendation, and measure the speed-up",
    )
    then.add_argument(
        "--no-trials", action="store_true", help="skip short trial runs of possible changes"
    )
    then.add_argument("--of", type=Path, metavar="DIR", help="report on an existing profile")
    then.add_argument(
        "--out",
        type=Path,
        default=Path("profile"),
        metavar="DIR",
        help="folder for profiles (default: profile)",
    )
    parsers.add_json_flag(then)
    parser.add_argument("stray", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run_profile, command=None)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    numbers = [int(one) for one in (first, last or first) if one.isdecimal()]
    least = (
        WARM_UP_STEPS + _PLAIN_STEPS + 3
    )  # the profiler has a warm-up step, and one step follows the trace
    if len(numbers) != 2 or not least <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid range of steps; write for example 20:23, starting at step "
            f"{least} or later: the steps before are timed without the profiler"
        )
    return numbers[0], numbers[1]


def _on_ranks(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of ranks; write all, or for example 0,1"
        )
    return tuple(sorted({int(word) for word in words}))


def _profile_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run_profile(options: argparse.Namespace) -> int:
    # Imported on use.
    from torchmuster.bench.profile import advice, analysis, capture

    asked = None
    if options.of is not None:
        folder = options.of
        trials, proof = capture.read_trials(folder)
    else:
        asked = _asked(options)
        folder = Path(asked.into)
        _record(asked)
        trials, proof = (), None
    found = analysis.analyse_profile(folder, say=output.say)
    if asked is not None and not options.no_trials and found.wanted:
        output.say("running trials of changes: " + ", ".join(map(str, found.wanted)))
        trials = capture.try_changes(asked, found.wanted, rounds=_TRIAL_ROUNDS, say=output.say)
    advised = advice.advise(found, trials)
    if options.verify:
        asked = asked or capture.read_asked(folder)
        proof = _proof(asked, advised)
    capture.write_trials(folder, trials, proof)
    _show_profile(options, folder, found, advised, proof)
    return ExitCode.GOOD


def _asked(options: argparse.Namespace) -> ProfileRequest:
    """Return the profile request; raise an error before anything runs if it cannot work."""
    from torchmuster.bench.profile.capture import new_folder

    device, devices = device_of_ranks(options)
    config = settings_file(options)
    ranks = options.ranks or devices or 1
    if device == "gpu" and ranks > devices:
        raise Impossible(
            f"{ranks} ranks on GPUs requested, but there are not enough GPUs",
            why=f"{devices} are visible, and each GPU gets one rank",
            fix=f"--ranks {devices}, or --device cpu",
        )
    beyond = [rank for rank in options.on_ranks or () if rank >= ranks]
    if beyond:
        raise Impossible(
            f"a trace of rank {beyond[0]} was requested, but there is no such rank",
            why=f"there are {ranks} ranks, numbered from 0",
            fix="--on-ranks all",
        )
    if config is None:
        script = script_from(options, Path.cwd())
        command, module = script.command, script.module
    else:
        last = options.steps[1]
        command = training_command(options, config, device, steps=last, doing="a trace of")
        module = True
    first, last = options.steps
    return ProfileRequest(
        command=command,
        module=module,
        with_run_folder=config is not None,
        folder=str(Path.cwd()),
        ranks=ranks,
        device=device,
        first_step=first,
        last_step=last,
        on_ranks=options.on_ranks,
        trace_most_bytes=options.most,
        with_memory=options.memory,
        into=str(new_folder(options.out).absolute()),
    )


def _record(asked: ProfileRequest) -> None:
    from torchmuster.bench.profile.capture import record_profile

    where = "the CPU" if asked.device == "cpu" else "GPUs"
    output.say(
        f"profiling on {asked.ranks} {'rank' if asked.ranks == 1 else 'ranks'}, on {where}: steps "
        f"{asked.first_step} to {asked.last_step} with the profiler, earlier steps without it"
    )
    record_profile(asked, say=output.say)


def _proof(asked: ProfileRequest, advised: Sequence["Advice"]) -> "ChangeTrial | None":
    """Apply the top recommendation and measure; None if it cannot be applied from here."""
    from torchmuster.bench.profile import capture

    if not advised:
        output.say("there is no recommendation to verify")
        return None
    change = advised[0].change
    if change is None:
        output.say(
            "the top recommendation cannot be applied from here: change the training code or the host"
        )
        return None
    found = capture.try_changes(asked, (change,), rounds=_PROOF_ROUNDS, say=output.say)
    if not found:
        raise MusterError(
            f"cannot verify {change}",
            why="the training failed with the change, or the change had no effect",
            fix="apply the change by hand, and profile again",
        )
    return found[0]


def _show_profile(
    options: argparse.Namespace,
    folder: Path,
    found: "Analysis",
    advised: Sequence["Advice"],
    proof: "ChangeTrial | None",
) -> None:
    from torchmuster.bench.report import profile
    from torchmuster.runfolder import write_atomically

    write_atomically(folder / "report.html", profile.profile_page(found, advised, proof))
    if options.json:
        output.print_json(
            {
                "folder": str(folder),
                "step_s": found.step_s,
                "ranks": [
                    {"rank": one.facts.rank, "shares_s": one.shares.by_name()}
                    for one in found.ranks
                ],
                "advice": [
                    {
                        "cause": one.cause,
                        "gain": one.gain,
                        "known_by": one.known_by,
                        "change": None if one.change is None else one.change.written,
                        "finding": one.finding.as_json(),
                    }
                    for one in advised
                ],
                "measured": None
                if proof is None
                else {"change": proof.change.written, "gain": proof.gain},
            }
        )
        return
    width = min(shutil.get_terminal_size().columns, _WIDTH)
    colour = output.wants_colour(sys.stdout)
    output.print_coloured(
        profile.profile_screen(found, advised, proof, folder, width=width, colour=colour)
    )
