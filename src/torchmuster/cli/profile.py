"""``muster profile``: find where training time goes, and what would make it faster."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from torchmuster.cli import output, parsers
from torchmuster.cli.config import add_setting_flags
from torchmuster.cli.job_flags import count
from torchmuster.cli.scripts import script_from
from torchmuster.cli.training_command import device_of_ranks, settings_file, training_command
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.profile.facts import (
    REQUEST_FILE,
    WARM_UP_STEPS,
    ProfileRequest,
    Trial,
    Trials,
    read_facts,
    read_json,
)
from torchmuster.runfolder import write_atomically

if TYPE_CHECKING:
    from torchmuster.profile.causes import Cause

_DEFAULT_STEPS = (20, 23)
_FIRST_STEP = WARM_UP_STEPS + 6  # steps without the profiler are timed before it
_TRIAL_ROUNDS, _PROOF_ROUNDS = 2, 3
_WIDTH = 100
_TRIALS_FILE = "trials.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster profile``."""
    parser.usage = "muster profile [options] script.py [the script's arguments] | config.yaml | DIR"
    parser.description = (
        f"{parser.description}\nRuns the training on this machine, traces the requested steps, "
        "and stops. A script needs no\nchange. Reports where each rank's time goes, what to change, "
        "and the expected speed-up. With the\nfolder DIR of a recorded profile: reports on that one."
    )
    parsers.show_examples(
        parser,
        [
            "muster profile train.py --lr 1e-4              one rank per GPU, or one on the CPU",
            "muster profile --ranks 2 config.yaml           a settings file of muster train",
            "muster profile --verify train.py               apply the top recommendation, and measure",
            "muster profile --steps 50:53 --on-ranks 0 train.py    other steps, one rank's trace",
            "muster profile profile/2026-01-31-120000       report on a recorded profile",
        ],
    )
    add_setting_flags(parser)
    recording = parser.add_argument_group("recording")
    recording.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="number of ranks (default: one per GPU, or 1 on the CPU)",
    )
    recording.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="device of the ranks (default: GPUs if there are any, else the CPU)",
    )
    recording.add_argument(
        "--steps",
        type=_steps,
        default=_DEFAULT_STEPS,
        metavar="A:B",
        help="first and last step to trace (default: 20:23); earlier steps are timed",
    )
    recording.add_argument(
        "--on-ranks",
        type=_on_ranks,
        metavar="R,…",
        help="ranks whose traces are kept (default: all)",
    )
    analysis = parser.add_argument_group("analysis and output")
    analysis.add_argument(
        "--verify",
        action="store_true",
        help="apply the top recommendation, and measure the speed-up",
    )
    analysis.add_argument(
        "--no-trials", action="store_true", help="skip short trial runs of possible changes"
    )
    analysis.add_argument(
        "--out",
        type=Path,
        default=Path("profile"),
        metavar="DIR",
        help="folder for profiles (default: profile)",
    )
    parsers.add_json_flag(analysis)
    parser.add_argument("stray", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run, command=None)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    last = last or first
    if first.isdecimal() and last.isdecimal() and _FIRST_STEP <= int(first) <= int(last):
        return int(first), int(last)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a valid range of steps; write for example 20:23, starting at step "
        f"{_FIRST_STEP} or later: the steps before are timed without the profiler"
    )


def _on_ranks(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of ranks; write all, or for example 0,1"
        )
    return tuple(sorted({int(number) for number in numbers}))


def _run(options: argparse.Namespace) -> int:
    # Imported on use.
    from torchmuster.profile import report, trials
    from torchmuster.profile.analysis import Profile
    from torchmuster.profile.causes import changes_to_try, find_causes

    folder = _recorded(options)
    if folder is not None:
        request = read_json(folder / REQUEST_FILE, ProfileRequest)
        profile = Profile(read_facts(folder))
        results = Trials()
        if (folder / _TRIALS_FILE).exists():
            results = read_json(folder / _TRIALS_FILE, Trials)
    else:
        request = _request(options)
        folder = Path(request.into)
        output.say(
            f"profiling steps {request.first_step} to {request.last_step} on {request.ranks} "
            f"{request.device.upper()} ranks; earlier steps run without the profiler"
        )
        profile = Profile(trials.record_profile(request, output.say))
        changes = changes_to_try(profile)
        results = Trials()
        if changes and not options.no_trials:
            output.say("running trials of changes: " + ", ".join(map(str, changes)))
            tried = trials.try_changes(request, changes, _TRIAL_ROUNDS, output.say)
            results = Trials(trials=tuple(tried))
    causes = find_causes(profile, results.trials)
    if options.verify:
        results = Trials(trials=results.trials, proof=_proof(request, causes))
    write_atomically(folder / _TRIALS_FILE, msgspec.json.encode(results).decode())
    write_atomically(folder / "report.html", report.page(profile, causes, results))
    if options.json:
        output.print_json(_answer(folder, profile.step_s, profile.shares, causes, results.proof))
        return ExitCode.GOOD
    width = min(shutil.get_terminal_size().columns, _WIDTH)
    colour = output.wants_colour(sys.stdout)
    text = report.screen(profile, causes, results, folder, width=width, colour=colour)
    output.print_coloured(text)
    return ExitCode.GOOD


def _recorded(options: argparse.Namespace) -> Path | None:
    """Return the folder of a recorded profile if the command line has one."""
    words = options.stray or options.command or []
    if len(words) == 1 and Path(words[0]).is_dir():
        return Path(words[0])
    return None


def _request(options: argparse.Namespace) -> ProfileRequest:
    """Return the profile request; raise an error before anything runs if it cannot work."""
    device, devices = device_of_ranks(options)
    config = settings_file(options)
    ranks = options.ranks or devices or 1
    if device == "gpu" and ranks > devices:
        raise Impossible(
            f"{ranks} ranks on GPUs requested, but there are not enough GPUs",
            why=f"{devices} are visible, and each GPU gets one rank",
            fix=f"--ranks {devices}, or --device cpu",
        )
    missing = [rank for rank in options.on_ranks or () if rank >= ranks]
    if missing:
        raise Impossible(
            f"a trace of rank {missing[0]} was requested, but there is no such rank",
            why=f"there are {ranks} ranks, numbered from 0",
            fix="--on-ranks all",
        )
    first, last = options.steps
    if config is None:
        script = script_from(options, Path.cwd())
        command, module = script.command, script.module
    else:
        command = training_command(options, config, device, steps=last, doing="a trace of")
        module = True
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
        into=str(output.new_folder(options.out).absolute()),
    )


def _proof(request: ProfileRequest, causes: Sequence["Cause"]) -> Trial | None:
    """Apply the top recommendation and measure; None if it cannot be applied from here."""
    from torchmuster.profile.trials import try_changes

    if not causes:
        output.say("there is no recommendation to verify")
        return None
    change = causes[0].change
    if change is None:
        output.say(
            "the top recommendation cannot be applied from here: change the training code or the host"
        )
        return None
    trials = try_changes(request, (change,), _PROOF_ROUNDS, output.say)
    if not trials:
        raise MusterError(
            f"cannot verify {change}",
            why="the training failed with the change, or the change had no effect",
            fix="apply the change by hand, and profile again",
        )
    return trials[0]


def _answer(
    folder: Path,
    step_s: float,
    shares: Sequence[dict[str, float]],
    causes: Sequence["Cause"],
    proof: Trial | None,
) -> dict[str, object]:
    advice = []
    for cause in causes:
        advice.append(
            {
                "cause": cause.name,
                "gain": cause.gain,
                "known_by": cause.known_by,
                "change": cause.change and cause.change.written,
                "finding": cause.finding.as_json(),
            }
        )
    ranks = [{"rank": rank, "shares_s": shares_s} for rank, shares_s in enumerate(shares)]
    measured = proof and {"change": proof.change.written, "gain": proof.gain}
    return {
        "folder": str(folder),
        "step_s": step_s,
        "ranks": ranks,
        "advice": advice,
        "measured": measured,
    }
