"""Run the trials of a proof: the script from its start, stopped, resumed, and on other numbers of ranks."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.history.resume import plan_resume, with_arguments
from torchmuster.launch.history.script_checkpoints import SAVES
from torchmuster.launch.job import JobSpec
from torchmuster.prove import forked_ranks
from torchmuster.prove.records import (
    EventRecord,
    How,
    RankRecord,
    StepRecord,
    StopRequest,
    TrialRecord,
    TrialRequest,
    read_ranks,
)
from torchmuster.prove.workspace import Workspace
from torchmuster.redaction import printable
from torchmuster.untrusted import read_json_lines

HOW = {
    "kill-all": "SIGKILL of all ranks",
    "kill-rank": "SIGKILL of one rank",
    "sigterm": "SIGTERM",
    "in-save": "SIGKILL during a save",
}
_OUTSIDE = "muster prove: the script writes to"
STOPS = ("killed", "rank-killed", "terminated", "save-killed")


@dataclass(frozen=True, kw_only=True)
class ProofRequest:
    """What to prove, and of which script."""

    command: tuple[str, ...]
    module: bool
    with_run_folder: bool
    folder: str
    into: str
    steps: int
    most_steps: int = 0  # of the first run, if it has saved no checkpoint before
    ranks: int  # of the trials that are stopped and repeated
    other_ranks: tuple[int, ...] = ()
    device: Literal["cpu", "gpu"] = "cpu"
    resume_with: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    batch_argument: str = ""
    accumulation_argument: str = ""
    stops: tuple[str, ...] = STOPS
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ResumeTrial:
    """A run that was stopped, and its continuation."""

    name: str
    stop: StopRequest
    stopped: TrialRecord
    resumed: TrialRecord
    arguments: tuple[str, ...]  # that were added to resume
    torn: bool = False


class Trials:
    """Runs trials in copies of the working folder."""

    def __init__(self, request: ProofRequest, say: Callable[[str], None]) -> None:
        self._request, self._say = request, say
        self._into = Path(request.into)
        self._outputs = request.outputs
        self._steps = request.steps
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if request.device == "cpu" else {}
        forked_ranks.preload_for(_script_text_of(request), {**hidden, **request.environment})
        self.failed: TrialRecord | None = None  # an undisturbed run that failed
        self.runs = 0

    @contextmanager
    def prepared(self) -> Iterator["Trials"]:
        """Delete the copies and temporary files at the end."""
        self._temporary = tempfile.mkdtemp(prefix="muster-", dir="/tmp")  # sockets need short paths
        try:
            yield self
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
            shutil.rmtree(self._into / "trials", ignore_errors=True)

    def run(
        self,
        name: str,
        doing: str,
        *,
        ranks: int | None = None,
        arguments: Sequence[str] = (),
        stop: StopRequest | None = None,
        dropout: bool = True,
        folder: Path | None = None,
        fresh: bool = False,
        steps: int | None = None,
        most_steps: int = 0,
    ) -> TrialRecord:
        """Run the script once, from its start or in the ``folder`` of a stopped trial."""
        self.runs += 1
        self._say(f"run {self.runs}: {doing}")
        workspace = self._workspace()
        if folder is None:
            folder, command = workspace.copy(name)
        else:
            command = workspace.fitted(folder, self._request.command)
        command = (command[0], *with_arguments(command[1:], arguments))
        records = self._into / "records" / name
        records.mkdir(parents=True)
        request = TrialRequest(
            name=name,
            command=command,
            module=self._request.module,
            with_run_folder=self._request.with_run_folder,
            folder=str(folder),
            into=str(records),
            ranks=ranks or self._request.ranks,
            device=self._request.device,
            steps=steps or self._steps,
            most_steps=most_steps,
            stop=stop,
            dropout=dropout,
        )
        environment = {
            **self._request.environment,
            **_tracker_variables(folder),
            "TMPDIR": self._temporary,
        }
        trouble = forked_ranks.run_ranks(
            request, environment, fresh=fresh, doing=f"run {self.runs}", say=self._say
        )
        recorded = read_ranks(records, request.ranks)
        return TrialRecord(ranks=recorded, trouble=trouble, saves=_saves(recorded, folder))

    def _workspace(self) -> Workspace:
        return Workspace(
            folder=Path(self._request.folder),
            command=self._request.command,
            module=self._request.module,
            outputs=self._outputs,
            within=self._into / "trials",
            reports=self._into.parent,
        )

    def baseline(self) -> TrialRecord:
        """Run the script undisturbed; a second time if it wrote into a folder with older files.

        The other runs make as many steps. Without a request, the run goes on until a checkpoint.
        """
        most_steps = self._request.most_steps
        record = self._checked(self.run("baseline", "undisturbed", most_steps=most_steps))
        if record.saves:
            self._steps = max(self._steps, record.steps)
        record = record.up_to(self._steps)
        folder = self._into / "trials" / "baseline"
        used = self._used_folders(record, folder)
        if used:
            names = ", ".join(sorted(used))
            self._say(f"the script saves into {names}, which has files of earlier runs")
            self._outputs = (*self._outputs, *sorted(used))
            again = self.run("baseline-2", "undisturbed, with empty output folders")
            record = self._checked(again)
        return record

    def _used_folders(self, record: TrialRecord, copy: Path) -> set[str]:
        """Return the folders with checkpoints of the trial that were not empty before."""
        found = set()
        for save in record.saves:
            place = Path(save.path)
            if place.is_relative_to(copy):
                inside = place.relative_to(copy).parts[0]
                own = Path(self._request.folder, inside)
                is_used = own.is_file() or (own.is_dir() and any(own.iterdir()))
                if is_used and inside not in self._outputs:
                    found.add(inside)
        return found - {Path(one).parts[0] for one in self._workspace().all_outputs()}

    def _checked(self, record: TrialRecord) -> TrialRecord:
        script = Path(self._request.command[0]).name
        if record.trouble:
            self.failed = record
            if _OUTSIDE in record.trouble:
                raise Impossible(
                    f"{script} writes outside its folder",
                    why=next(one for one in record.trouble.splitlines() if _OUTSIDE in one),
                    fix="pass that folder as an argument of the script, and give it to muster prove; a large folder in the "
                    "working folder is linked, not copied, unless it is given: --outputs DIR",
                )
            raise MusterError(
                f"{script} failed in an undisturbed run",
                why=record.trouble,
                fix=f"first make it run: muster run {script}",
            )
        loads = [event.path for event in record.ranks[0].of_kind("load")]
        if record.steps < 2 and loads:
            raise Impossible(
                f"{script} made {record.steps} optimizer steps after it loaded {Path(loads[-1]).name}",
                why="it resumed from a checkpoint of an earlier run, which was copied with the folder",
                fix="give the file or its folder, which is then not copied: --outputs PATH",
            )
        if record.steps < 2:
            raise Impossible(
                f"{script} made {record.steps} optimizer steps: too few to compare",
                why="a step is a call of step() of a torch.optim optimizer after a forward of a module",
                fix="give it more data or epochs; only torch.optim optimizers are recognized",
            )
        return record

    def stop_and_resume(self, name: str, stop: StopRequest, baseline: TrialRecord) -> ResumeTrial:
        """Stop the script, restart it in the same folder with its resume arguments, and record both."""
        by = HOW[stop.how]
        stopped = self.run(
            f"{name}-stopped", f"stopped after step {stop.after_step} by {by}", stop=stop
        )
        folder = self._into / "trials" / f"{name}-stopped"
        arguments = self._resume_arguments(folder, stopped)
        done = max((save.step for save in stopped.saves), default=0)
        resumed = self.run(
            f"{name}-resumed",
            "resumed" + (f" with {printable(arguments)}" if arguments else ""),
            arguments=arguments,
            folder=folder,
            steps=max(baseline.steps - done, 1),
        )
        return ResumeTrial(
            name=name,
            stop=stop,
            stopped=stopped,
            resumed=resumed,
            arguments=arguments,
            torn=stop.how == "in-save",
        )

    def _resume_arguments(self, folder: Path, stopped: TrialRecord) -> tuple[str, ...]:
        if self._request.with_run_folder:
            return ()
        metrics = folder / ".muster-metrics"
        metrics.mkdir(exist_ok=True)
        lines = [
            {
                "step": save.step,
                "path": save.path,
                "library": save.library,
                "at_unix_s": _modified(save.path),
                "bytes": _size(save.path),
            }
            for save in stopped.saves
        ]
        (metrics / SAVES).write_text("".join(json.dumps(line) + "\n" for line in lines))
        spec = JobSpec(
            name="prove",
            command=self._request.command,
            module=self._request.module,
            folder=str(folder),
            resume_with=self._request.resume_with,
        )
        return plan_resume(spec, metrics).on_restart()


def _script_text_of(request: ProofRequest) -> str:
    """Return the source of the script; "" for another module than that of ``muster train``."""
    if request.with_run_folder:
        return "import torchmuster"
    path = Path(request.folder, request.command[0])
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _modified(path: str) -> float:
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0


def _size(path: str) -> int | None:
    place = Path(path)
    try:
        if place.is_dir():
            return sum(one.stat().st_size for one in place.rglob("*") if one.is_file())
        return place.stat().st_size
    except OSError:
        return None


def _tracker_variables(folder: Path) -> dict[str, str]:
    """Return the variables that switch experiment trackers off, or keep them in the folder."""
    return {
        "WANDB_MODE": "disabled",
        "COMET_MODE": "disabled",
        "NEPTUNE_MODE": "debug",
        "SWANLAB_MODE": "disabled",
        "CLEARML_OFFLINE_MODE": "1",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def _saves(ranks: Sequence[RankRecord], folder: Path) -> list[EventRecord]:
    """Return the checkpoints that were written, oldest first: of a script, or of ``muster train``."""
    found = [event for rank in ranks[:1] for event in rank.of_kind("save")]
    largest = max((_size(event.path) or 0 for event in found), default=0)
    # Scripts also save small things, such as losses.
    found = [one for one in found if (_size(one.path) or largest) >= 0.1 * largest]
    own = folder / "run" / "metrics" / SAVES
    if not own.exists():
        return found
    return [
        EventRecord(
            kind="save", step=line["step"], path=str(line.get("path", "")), library="muster"
        )
        for line in read_json_lines(own)
        if isinstance(line.get("step"), int)
    ]


def stops_for(baseline: TrialRecord) -> list[tuple[str, StopRequest]]:
    """Choose where to stop: in an epoch, at its end, by SIGTERM, and in a save. Pure.

    Each stop follows a checkpoint by one step, so that a script that ignores its newest checkpoint is noticed.
    """
    steps = baseline.steps
    first = baseline.ranks[0].steps
    saves = sorted({save.step for save in baseline.saves if 0 < save.step < steps})
    if not saves:
        return []
    at_end = [step for step in saves if _ends_epoch(first[step - 1 : step + 1])]
    inside = [step for step in saves if step not in at_end]
    evaluated = [step for step in saves if first[step - 1].evaluated]
    chosen: list[tuple[str, StopRequest]] = []

    def add(name: str, after: int, how: How, in_micro_batch: int = 0) -> None:
        last = min(after, steps - 1)
        chosen.append((name, StopRequest(after_step=last, how=how, in_micro_batch=in_micro_batch)))

    middle = (inside or saves)[-1 if len(inside or saves) < 3 else -2]
    add("killed", middle + (1 if middle + 1 not in saves else 0), "kill-all")
    end = (at_end or evaluated or saves)[-1]
    add("rank-killed", end + (1 if end + 1 not in saves else 0), "kill-rank")
    after = min((inside or saves)[0] + 1, steps - 1)
    add("terminated", after, "sigterm", in_micro_batch=int(len(first[after].micro_batches) > 1))
    if len(saves) > 1:
        add("save-killed", saves[1], "in-save")
    return chosen


def _ends_epoch(steps: Sequence[StepRecord]) -> bool:
    """Return whether the second of two steps begins another iteration of its loader."""
    places = [step.micro_batches[0].place for step in steps]
    if len(places) < 2 or places[0] is None or places[1] is None:
        return False
    return places[0][:2] != places[1][:2]
