"""Run the trials of a proof: the script from its start, stopped, resumed, and on other numbers of ranks."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.history.resume import plan_resume
from torchmuster.launch.history.script_checkpoints import SAVES
from torchmuster.launch.job import JobSpec
from torchmuster.prove import ranks as rank_processes
from torchmuster.prove.comparing_ranks import Variation
from torchmuster.prove.records import (
    EventRecord,
    PlannedStop,
    RankRecord,
    StepRecord,
    TrialRecord,
    TrialRequest,
    read_ranks,
)
from torchmuster.prove.workspace import Workspace
from torchmuster.redaction import printable
from torchmuster.units import plural
from torchmuster.untrusted import read_json_lines

HOW = {
    "killed": "SIGKILL of all ranks",
    "rank-killed": "SIGKILL of one rank",
    "terminated": "SIGTERM",
    "save-killed": "SIGKILL during a save",
}
STOPS = tuple(HOW)
# Scripts also save small things, such as losses: a checkpoint has this share of the largest file.
_CHECKPOINT_SHARE = 0.1
_OUTSIDE = "muster prove: the script writes to"
# Switch experiment trackers off.
_NO_TRACKERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@dataclass(frozen=True, kw_only=True)
class ProofRequest:
    """What to prove, and of which script."""

    trial: TrialRequest  # in the user's folder, with the folder of the report
    most_steps: int = 0  # of the first run, if it has saved no checkpoint before
    other_ranks: tuple[int, ...] = ()
    resume_with: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    batch_argument: str = ""
    accumulation_argument: str = ""
    stops: tuple[str, ...] = STOPS
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> str:
        """The name of the script."""
        first = self.trial.command[0]
        return first if self.trial.module else Path(first).name

    def source(self) -> str:
        """Return the text of the script; "" for another module than that of ``muster train``."""
        if self.trial.with_run_folder:
            return "import torchmuster"
        path = Path(self.trial.folder, self.trial.command[0])
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
        return ""


@dataclass(frozen=True, kw_only=True)
class ResumeTrial:
    """A run that was stopped, and its continuation."""

    stop: PlannedStop
    stopped: TrialRecord
    resumed: TrialRecord

    @property
    def newest_step(self) -> int:
        """The step of the newest complete checkpoint of the stopped run; 0 if there is none."""
        return max((save.step for save in self.stopped.saves), default=0)


class FailedBaseline(MusterError):
    """The script failed in an undisturbed run, which recorded this much."""

    def __init__(self, what: str, *, why: str, fix: str, record: TrialRecord) -> None:
        super().__init__(what, why=why, fix=fix)
        self.record = record


class Trials:
    """Runs trials in copies of the working folder."""

    def __init__(self, request: ProofRequest, say: Callable[[str], None], temporary: str) -> None:
        self._request, self._say = request, say
        self._trial = request.trial
        self._into = Path(self._trial.into)
        self._workspace = Workspace(
            folder=Path(self._trial.folder),
            command=self._trial.command,
            module=self._trial.module,
            outputs=request.outputs,
            within=self._into / "trials",
            reports=self._into.parent,
        )
        environment = dict(request.environment)
        if self._trial.device == "cpu":
            environment.setdefault("CUDA_VISIBLE_DEVICES", "")
        rank_processes.start_server(request.source(), environment)
        self._environment = {**environment, **_NO_TRACKERS, "TMPDIR": temporary}
        self.runs = 0

    @classmethod
    @contextmanager
    def prepared(cls, request: ProofRequest, say: Callable[[str], None]) -> Iterator["Trials"]:
        """Prepare the runs; delete the copies and temporary files at the end."""
        temporary = tempfile.mkdtemp(prefix="muster-", dir="/tmp")  # sockets need short paths
        try:
            yield cls(request, say, temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(Path(request.trial.into, "trials"), ignore_errors=True)

    def run(
        self,
        name: str,
        doing: str,
        *,
        arguments: Sequence[str] = (),
        folder: Path | None = None,
        fresh: bool = False,
        **changes: Any,
    ) -> TrialRecord:
        """Run the script once, from its start or in the ``folder`` of a stopped trial.

        ``changes`` are fields of the ``TrialRequest``, such as ``stop``.
        """
        self.runs += 1
        self._say(f"run {self.runs}: {doing}")
        if folder is None:
            folder = self._workspace.copy(name)
        command = self._workspace.command_in(folder)
        records = self._into / "records" / name
        records.mkdir(parents=True)
        request = replace(
            self._trial,
            command=(*command, *arguments),
            folder=str(folder),
            into=str(records),
            **changes,
        )
        environment = {
            **self._environment,
            "TORCHELASTIC_RUN_ID": name,
            "TRACKIO_DIR": str(folder / "trackio"),
            "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        }
        trouble = rank_processes.run_trial(request, environment, fresh=fresh)
        recorded = read_ranks(records, request.ranks)
        return TrialRecord(ranks=recorded, trouble=trouble, saves=_saves(recorded[0], folder))

    # ---- the undisturbed run

    def baseline(self) -> TrialRecord:
        """Run the script undisturbed; a second time if it wrote into a folder with older files.

        The other runs make as many steps. Without a request, the run goes on until a checkpoint.
        """
        record = self.run("baseline", "undisturbed", most_steps=self._request.most_steps)
        self._check(record)
        if record.saves:
            self._trial = replace(self._trial, steps=max(self._trial.steps, record.steps))
        record = record.up_to(self._trial.steps)
        used = self._used_outputs(record)
        if used:
            self._say(f"the script saves into {', '.join(used)}, which has files of earlier runs")
            outputs = (*self._workspace.outputs, *used)
            self._workspace = replace(self._workspace, outputs=outputs)
            record = self.run("baseline-2", "undisturbed, with empty output folders")
            self._check(record)
        return record

    def _used_outputs(self, record: TrialRecord) -> list[str]:
        """Return folders and files with checkpoints of the trial that were not empty before."""
        copy = self._into / "trials" / "baseline"
        known = {Path(output).parts[0] for output in self._workspace.all_outputs()}
        used = set()
        for save in record.saves:
            path = Path(save.path)
            if not path.is_relative_to(copy):
                continue
            name = path.relative_to(copy).parts[0]
            users = Path(self._trial.folder, name)
            is_used = users.is_file() or (users.is_dir() and any(users.iterdir()))
            if is_used and name not in known:
                used.add(name)
        return sorted(used)

    def _check(self, record: TrialRecord) -> None:
        script = self._request.script
        for line in record.trouble.splitlines():
            if _OUTSIDE in line:
                raise Impossible(
                    f"{script} writes outside its folder",
                    why=line,
                    fix="pass that folder as an argument of the script, and give it to muster prove; a large folder in "
                    "the working folder is linked, not copied, unless it is given: --outputs DIR",
                )
        if record.trouble:
            raise FailedBaseline(
                f"{script} failed in an undisturbed run",
                why=record.trouble,
                fix=f"first make it run: muster run {script}",
                record=record,
            )
        if record.steps >= 2:
            return
        raise Impossible(
            f"{script} made {record.steps} optimizer steps: too few to compare",
            why="a step is a call of step() of a torch.optim optimizer after a forward of a module; a checkpoint of an "
            "earlier run is copied with the folder, and the script may have resumed from it",
            fix="--outputs PATH for the file or folder of such a checkpoint; else give it more data or epochs",
        )

    # ---- stopped and resumed

    def stop_and_resume(self, stop: PlannedStop, baseline: TrialRecord) -> ResumeTrial:
        """Stop the script, restart it in the same folder with its resume arguments, and record both."""
        name = f"{stop.name}-stopped"
        doing = f"stopped after step {stop.after_step} by {HOW[stop.name]}"
        stopped = self.run(name, doing, stop=stop)
        folder = self._into / "trials" / name
        arguments = self._resume_arguments(folder, stopped)
        doing = "resumed"
        if arguments:
            doing = f"resumed with {printable(arguments)}"
        done = max((save.step for save in stopped.saves), default=0)
        resumed = self.run(
            f"{stop.name}-resumed",
            doing,
            arguments=arguments,
            folder=folder,
            steps=max(baseline.steps - done, 1),
        )
        return ResumeTrial(stop=stop, stopped=stopped, resumed=resumed)

    def _resume_arguments(self, folder: Path, stopped: TrialRecord) -> tuple[str, ...]:
        """Return the arguments with which ``muster run`` would resume the script."""
        if self._trial.with_run_folder:
            return ()
        metrics = folder / ".muster-metrics"
        metrics.mkdir(exist_ok=True)
        lines = []
        for save in stopped.saves:
            path = Path(save.path)
            line = {
                "step": save.step,
                "path": save.path,
                "library": save.library,
                "at_unix_s": path.stat().st_mtime if path.exists() else 0.0,
                "bytes": _size(path),
            }
            lines.append(json.dumps(line) + "\n")
        (metrics / SAVES).write_text("".join(lines))
        spec = JobSpec(
            name="prove",
            command=self._trial.command,
            module=self._trial.module,
            folder=str(folder),
            resume_with=self._request.resume_with,
        )
        return plan_resume(spec, metrics).on_restart()

    # ---- the same global batch, distributed otherwise

    def variations(self, baseline: TrialRecord) -> Iterator[list[Variation]]:
        """Yield groups of runs that must have the same gradients: other ranks, more accumulation."""
        request = self._request
        flag = _flag(request.batch_argument)
        batch = self._batch_size(baseline)
        if request.other_ranks and not flag and not self._trial.with_run_folder:
            raise Impossible(
                "whether other numbers of ranks give the same gradients",
                why="the global batch must stay the same",
                fix="name the script's argument for the batch per rank, for example --batch-arg batch_size",
            )
        if request.other_ranks:
            counts = sorted({self._trial.ranks, *request.other_ranks})
            yield [self._on_ranks(count, flag, batch) for count in counts]
        if request.accumulation_argument:
            if not flag or batch % 2:
                raise Impossible(
                    "--accumulation-arg needs --batch-arg, and an even batch per rank",
                    why=f"half the batch is used with twice the accumulation; the batch is {batch}",
                    fix="--batch-arg NAME --accumulation-arg NAME",
                )
            yield [self._accumulated(factor, flag, batch) for factor in (1, 2)]

    def _on_ranks(self, count: int, flag: str, batch: int) -> Variation:
        total = batch * self._trial.ranks
        if total % count:
            raise Impossible(
                f"a global batch of {total} cannot be split over {count} ranks",
                why=f"{self._trial.ranks} ranks have {batch} samples each",
                fix=f"set {flag} so that {count} divides it, or leave out --ranks {count}",
            )
        arguments: tuple[str, ...] = ()
        if flag:
            arguments = (flag, str(total // count))
        name = plural(count, "rank")
        check = name.replace(" ", "-")
        return Variation(name=name, count=count, ranks=count, arguments=arguments, check=check)

    def _accumulated(self, factor: int, batch_flag: str, batch: int) -> Variation:
        flag = _flag(self._request.accumulation_argument)
        count = factor * int(_value_of(self._trial.command, flag) or 1)
        return Variation(
            name=f"{plural(count, 'micro-batch')} per step",
            count=count,
            ranks=self._trial.ranks,
            arguments=(batch_flag, str(batch // factor), flag, str(count)),
            check="accumulation",
        )

    def run_variation(self, variation: Variation) -> TrialRecord:
        """Run a variation, without dropout: other ranks draw other random numbers."""
        record = self.run(
            variation.name.replace(" ", "-"),
            f"{variation.name}, without dropout: {' '.join(variation.arguments)}",
            ranks=variation.ranks,
            arguments=variation.arguments,
            dropout=False,
        )
        if record.trouble or not record.steps:
            raise MusterError(
                f"{self._request.script} failed with {variation.name}",
                why=record.trouble,
                fix="leave out this number of ranks: --ranks",
            )
        return record

    def _batch_size(self, baseline: TrialRecord) -> int:
        """Return the samples per rank and micro-batch: of the script's argument, or as recorded."""
        value = _value_of(self._trial.command, _flag(self._request.batch_argument))
        if value.isdecimal():
            return int(value)
        sizes = [len(batch.samples) for batch in baseline.ranks[0].micro_batches()]
        return max(sizes)


def stops_for(baseline: TrialRecord) -> list[PlannedStop]:
    """Choose where to stop: in an epoch, at its end, by SIGTERM, and in a save. Pure.

    Each stop follows a checkpoint by one step, so that a script that ignores its newest checkpoint is noticed.
    """
    steps = baseline.ranks[0].steps
    last = baseline.steps - 1
    saves = sorted({save.step for save in baseline.saves if 0 < save.step <= last})
    if not saves:
        return []
    at_end = [save for save in saves if _ends_epoch(steps[save - 1], steps[save])]
    inside = [save for save in saves if save not in at_end] or saves
    middle = inside[-2] if len(inside) > 2 else inside[-1]
    end = (at_end or saves)[-1]

    def after(save: int) -> int:
        return save if save + 1 in saves else min(save + 1, last)

    term = min(inside[0] + 1, last)
    between = int(len(steps[term].micro_batches) > 1)  # two micro-batches, if there are some
    stops = [
        PlannedStop(name="killed", after_step=after(middle)),
        PlannedStop(name="rank-killed", after_step=after(end)),
        PlannedStop(name="terminated", after_step=term, in_micro_batch=between),
    ]
    if len(saves) > 1:
        stops.append(PlannedStop(name="save-killed", after_step=saves[1]))
    return stops


def _ends_epoch(step: StepRecord, following: StepRecord) -> bool:
    """Return whether the second of two steps begins another iteration of its loader."""
    before, after = step.micro_batches[0].place, following.micro_batches[0].place
    return before is not None and after is not None and before[:2] != after[:2]


def _saves(rank: RankRecord, folder: Path) -> list[EventRecord]:
    """Return the checkpoints that were written, oldest first: of a script, or of ``muster train``."""
    own = folder / "run" / "metrics" / SAVES
    if own.exists():
        lines = [line for line in read_json_lines(own) if isinstance(line.get("step"), int)]
        return [
            EventRecord(kind="save", step=line["step"], path=str(line.get("path", "")))
            for line in lines
        ]
    events = rank.of_kind("save")
    sizes = [_size(Path(event.path)) for event in events]
    least = _CHECKPOINT_SHARE * max((size or 0 for size in sizes), default=0)
    return [
        event for event, size in zip(events, sizes, strict=True) if size is None or size >= least
    ]


def _size(path: Path) -> int | None:
    """Return the bytes of a file or of all files of a folder; None if it is gone."""
    try:
        if path.is_dir():
            return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return path.stat().st_size
    except OSError:
        return None


def _flag(name: str) -> str:
    if not name or name.startswith("-"):
        return name
    return f"--{name}"


def _value_of(command: Sequence[str], flag: str) -> str:
    """Return the value of an argument in a command; "" if it is not there."""
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if flag and name == flag:
            if equals:
                return value
            return "".join(command[index + 1 : index + 2])
    return ""
