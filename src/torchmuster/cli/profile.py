"""``muster profile``: find where training time goes, and what would make it faster."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.cli import output
from torchmuster.cli.options import JsonOptions, command, count, flag
from torchmuster.cli.training_command import TrainedOptions, device_of_ranks, rank_command
from torchmuster.errors import ExitCode, Impossible
from torchmuster.profile.facts import WARM_UP_STEPS, ProfileRequest
from torchmuster.runfolder import write_atomically

if TYPE_CHECKING:
    from torchmuster.profile.analysis import Profile
    from torchmuster.profile.causes import Cause

DEFAULT_STEPS = (20, 23)
FIRST_STEP = WARM_UP_STEPS + 6  # steps without the profiler are timed before it
WIDTH = 100


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
    verify: bool = flag("try each change in short runs, and measure the speed-up", default=False)
    out: Path = flag(
        "folder for profiles (default: profile)", default=Path("profile"), parse=Path, metavar="DIR"
    )


@command(
    ProfileOptions,
    usage="muster profile [options] script.py [the script's arguments] | config.yaml",
    more="""
    Runs the training on this machine, traces the requested steps, and stops. A script needs no
    change. Reports where each rank's time goes, what to change, and the expected speed-up.
    """,
    examples=[
        "muster profile train.py --lr 1e-4              one rank per GPU, or one on the CPU",
        "muster profile --ranks 2 config.yaml           a settings file of muster train",
        "muster profile --verify train.py               try the changes, and measure",
        "muster profile --steps 50:53 train.py          other steps",
    ],
)
def run(options: ProfileOptions) -> int:
    """Profile the training, print the report, and return the exit code."""
    # Imported on use.
    from torchmuster.profile import report, trials
    from torchmuster.profile.analysis import Profile
    from torchmuster.profile.causes import find_causes, with_trials

    request = _request(options)
    folder = Path(request.into)
    output.say(
        f"profiling steps {request.first_step} to {request.last_step} on {request.ranks} "
        f"{request.device.upper()} ranks; earlier steps run without the profiler"
    )
    profile = Profile(trials.record_profile(request, output.say))
    causes = find_causes(profile)
    if options.verify:
        changes = [cause.change for cause in causes if cause.change is not None]
        causes = with_trials(causes, trials.try_changes(request, changes, output.say))
    if options.json:
        output.print_json(_answer(folder, profile, causes))
    else:
        width = min(shutil.get_terminal_size().columns, WIDTH)
        colour = output.wants_colour(sys.stdout)
        text = report.screen(profile, causes, folder, width=width, colour=colour)
        output.print_coloured(text)
    write_atomically(folder / "report.html", report.page(profile, causes))
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


def _answer(folder: Path, profile: "Profile", causes: Sequence["Cause"]) -> dict[str, object]:
    advice = []
    for cause in causes:
        described = {
            "cause": cause.name,
            "gain": cause.gain,
            "tried": cause.tried,
            "change": cause.change and asdict(cause.change),
            "finding": cause.finding.as_json(),
        }
        advice.append(described)
    return {
        "folder": str(folder),
        "step_s": profile.step_s,
        "ranks": [{"rank": rank, "shares_s": shares} for rank, shares in enumerate(profile.shares)],
        "advice": advice,
    }
