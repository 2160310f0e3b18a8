"""Run the trials of a proof: the script from its start, stopped, resumed, and on other numbers of ranks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.history.resume import plan_resume
from torchmuster.launch.history.script_checkpoints import SAVES
from torchmuster.launch.job import JobSpec
from torchmuster.prove import landlock
from torchmuster.prove import ranks as rank_processes
from torchmuster.prove.caches import moved_caches
from torchmuster.prove.records import (
    EventRecord,
    PlannedStop,
    ProofRequest,
    RankRecord,
    ResumeTrial,
    TrialRecord,
    read_ranks,
)
from torchmuster.prove.scaling import Variation
from torchmuster.prove.stops import HOW
from torchmuster.prove.workspace import Workspace
from torchmuster.redaction import printable
from torchmuster.untrusted import read_json_lines

FEWEST_STEPS = 2
# Scripts also save small things, such as losses: a checkpoint has this share of the largest file.
_CHECKPOINT_SHARE = 0.1
# How Python and torch.save, and a rename between folders, report that the kernel refused a write.
_REFUSALS = ("Permission denied", "Invalid cross-device link")
# Switch experiment trackers off.
_NO_TRACKERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


class Trials:
    """Runs trials in copies of the working folder; ``temporary`` is for temporary files of all of them."""

    def __init__(self, request: ProofRequest, say: Callable[[str], None], temporary: str) -> None:
        self.runs = 0
        self._request, self._say = request, say
        self._into = Path(request.into)
        self._workspace = Workspace(
            folder=Path(request.folder),
            command=request.command,
            module=request.module,
            outputs=request.outputs,
            within=self._into / "trials",
            reports=self._into.parent,
        )
        # Libraries read some of these when they are imported, in the process from which ranks are forked.
        before_imports = moved_caches(temporary)
        if request.device == "cpu":
            before_imports["CUDA_VISIBLE_DEVICES"] = ""
        rank_processes.start_server(_source(request), before_imports)
        self._environment = {**before_imports, **_NO_TRACKERS, "TMPDIR": temporary}

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

        ``changes`` are fields of the request, such as ``stop``.
        """
        self.runs += 1
        self._say(f"run {self.runs}: {doing}")
        if folder is None:
            folder = self._workspace.copy(name)
        command = self._workspace.command_in(folder)
        records = self._into / "records" / name
        records.mkdir(parents=True)
        request = replace(
            self._request,
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

    def baseline(self) -> TrialRecord:
        """Run the script undisturbed, without a request for steps until a checkpoint; later runs make as many steps."""
        record = self.run("baseline", "undisturbed")
        request = self._request
        steps = request.steps
        if record.saves:
            steps = max(steps, record.steps)
        self._request = replace(request, steps=steps, most_steps=0)
        return record.up_to(steps)

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
        resumed = self.run(
            f"{stop.name}-resumed",
            doing,
            arguments=arguments,
            folder=folder,
            steps=max(baseline.steps - stopped.newest_step, 1),
        )
        return ResumeTrial(stop=stop, stopped=stopped, resumed=resumed)

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

    def _resume_arguments(self, folder: Path, stopped: TrialRecord) -> tuple[str, ...]:
        """Return the arguments with which ``muster run`` would resume the script."""
        if self._request.with_run_folder:
            return ()
        metrics = folder / ".muster-metrics"
        metrics.mkdir(exist_ok=True)
        with (metrics / SAVES).open("w") as file:
            for save in stopped.saves:
                path = Path(save.path)
                line = {
                    "step": save.step,
                    "path": save.path,
                    "library": save.library,
                    "at_unix_s": path.stat().st_mtime if path.exists() else 0.0,
                    "bytes": _size(path),
                }
                file.write(json.dumps(line) + "\n")
        spec = JobSpec(
            name="prove",
            command=self._request.command,
            module=self._request.module,
            folder=str(folder),
            resume_with=self._request.resume_with,
        )
        return plan_resume(spec, metrics).on_restart()


def refuse_baseline(script: str, record: TrialRecord) -> None:
    """Refuse an undisturbed run that failed, or made too few steps to compare."""
    error = record.trouble.partition("\n")[0]
    if landlock.is_available() and any(refusal in error for refusal in _REFUSALS):
        raise Impossible(
            f"{script} may not write outside its folder",
            why=record.trouble,
            fix="pass that folder as an argument of the script, and give it to muster prove; a large folder in "
            "the working folder is linked, not copied, unless it is given: --outputs DIR",
        )
    if record.trouble:
        raise MusterError(
            f"{script} failed in an undisturbed run",
            why=record.trouble,
            fix=f"first make it run: muster run {script}",
        )
    if record.steps < FEWEST_STEPS:
        raise Impossible(
            f"{script} made {record.steps} optimizer steps: too few to compare",
            why="a step is a call of step() of a torch.optim optimizer after a forward of a module; a checkpoint of an "
            "earlier run is copied with the folder, and the script may have resumed from it",
            fix="--outputs PATH for the file or folder of such a checkpoint; else give it more data or epochs",
        )


def _source(request: ProofRequest) -> str:
    """Return the text of the script; "" for another module than that of ``muster train``."""
    if request.with_run_folder:
        return "import torchmuster"
    path = Path(request.folder, request.command[0])
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _saves(rank: RankRecord, folder: Path) -> list[EventRecord]:
    """Return the checkpoints that were written, oldest first: of a script, or of ``muster train``."""
    own = folder / "run" / "metrics" / SAVES
    if own.exists():
        return [
            EventRecord(kind="save", step=line["step"], path=line["path"])
            for line in read_json_lines(own)
        ]
    saves = rank.of_kind("save")
    sizes = {save.path: _size(Path(save.path)) for save in saves}
    least = _CHECKPOINT_SHARE * max((size or 0 for size in sizes.values()), default=0)
    checkpoints = []
    for save in saves:
        size = sizes[save.path]
        if size is None or size >= least:  # the script may have deleted an old one
            checkpoints.append(save)
    return checkpoints


def _size(path: Path) -> int | None:
    """Return the bytes of a file or of all files of a folder; None if it is gone."""
    try:
        if path.is_dir():
            return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return path.stat().st_size
    except OSError:
        return None
