"""``muster profile``: find where training time goes, and what would make it faster."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, command, count, flag
from torchmuster.cli.training_command import TrainedOptions, device_of_ranks, rank_command
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

DEFAULT_STEPS = (20, 23)
FIRST_STEP = WARM_UP_STEPS + 6  # steps without the profiler are timed before it
WIDTH = 100
TRIALS_FILE = "trials.json"


def steps_range(text: str) -> tuple[int, int]:
    """Parse the first and the last step to trace."""
    first, _, last = text.partition(":")
    last = last or first
    if first.isdecimal() and last.isdecimal() and FIRST_STEP <= int(first) <= int(last):
        return int(first), int(last)
    raise ValueError(
        f"{text!r} is not a valid range of steps; write for example 20:23, starting at step "
        f"{FIRST_STEP} or later: the steps before are timed without the profiler"
    )


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(TrainedOptions, JsonOptions):
    """The flags of ``muster profile``."""

    ranks: int | None = flag(
        "number of ranks (default: one per GPU, or 1 on the CPU)", parse=count, metavar="N"
    )
    steps: tuple[int, int] = flag(
        "first and last step to trace (default: 20:23); earlier steps are timed",
        default=DEFAULT_STEPS,
        parse=steps_range,
        metavar="A:B",
    )
    verify: bool = flag("apply the top recommendation, and measure the speed-up", default=False)
    no_trials: bool = flag("skip short trial runs of possible changes", default=False)
    out: Path = flag(
        "folder for profiles (default: profile)", default=Path("profile"), parse=Path, metavar="DIR"
    )


@command(
    ProfileOptions,
    usage="muster profile [options] script.py [the script's arguments] | config.yaml | DIR",
    more="""
    Runs the training on this machine, traces the requested steps, and stops. A script needs no
    change. Reports where each rank's time goes, what to change, and the expected speed-up. With the
    folder DIR of a recorded profile: reports on that one.
    """,
    examples=[
        "muster profile train.py --lr 1e-4              one rank per GPU, or one on the CPU",
        "muster profile --ranks 2 config.yaml           a settings file of muster train",
        "muster profile --verify train.py               apply the top recommendation, and measure",
        "muster profile --steps 50:53 train.py          other steps",
        "muster profile profile/2026-01-31-120000       report on a recorded profile",
    ],
)
def run(options: ProfileOptions) -> int:
    """Profile the training, or show a recorded profile, and return the exit code."""
    # Imported on use.
    from torchmuster.profile import report, trials
    from torchmuster.profile.analysis import Profile
    from torchmuster.profile.causes import changes_to_try, find_causes

    if len(options.script) == 1 and Path(options.script[0]).is_dir():
        folder = Path(options.script[0])
        request = read_json(folder / REQUEST_FILE, ProfileRequest)
        profile = Profile(read_facts(folder))
        results = Trials()
        if (folder / TRIALS_FILE).exists():
            results = read_json(folder / TRIALS_FILE, Trials)
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
            tried = trials.try_changes(request, changes, output.say)
            results = Trials(trials=tuple(tried))
    causes = find_causes(profile, results.trials)
    if options.verify:
        results = Trials(trials=results.trials, proof=_proof(request, causes))
    if options.json:
        output.print_json(_answer(folder, profile.step_s, profile.shares, causes, results.proof))
    else:
        width = min(shutil.get_terminal_size().columns, WIDTH)
        colour = output.wants_colour(sys.stdout)
        text = report.screen(profile, causes, results, folder, width=width, colour=colour)
        output.print_coloured(text)
    write_atomically(folder / TRIALS_FILE, msgspec.json.encode(results).decode())
    write_atomically(folder / "report.html", report.page(profile, causes, results))
    return ExitCode.GOOD


def _request(options: ProfileOptions) -> ProfileRequest:
    """Return the profile request; raise an error before anything runs if it cannot work."""
    device, devices = device_of_ranks(options)
    ranks = options.ranks or devices or 1
    if device == "gpu" and ranks > devices:
        raise Impossible(
            f"{ranks} ranks on GPUs requested, but there are not enough GPUs",
            why=f"{devices} are visible, and each GPU gets one rank",
            fix=f"--ranks {devices}, or --device cpu",
        )
    first, last = options.steps
    command = rank_command(options, device, steps=last, purpose="a trace of")
    return ProfileRequest(
        command=command.command,
        module=command.module,
        with_run_folder=command.is_worker,
        folder=str(Path.cwd()),
        ranks=ranks,
        device=device,
        first_step=first,
        last_step=last,
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
    trials = try_changes(request, (change,), output.say)
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
