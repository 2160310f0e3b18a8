"""How a script resumes: from its newest complete checkpoint, with arguments that it certainly takes."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from script_checkpoints import accelerate_folder, cut, record, torch_file, trainer_folder
from torchmuster.finding import Finding
from torchmuster.launch.history import resume, run_state
from torchmuster.launch.history.resume import plan_resume
from torchmuster.launch.history.script_checkpoints import (
    newest_usable,
    read_script_checkpoints,
    saved_after,
)
from torchmuster.launch.job import Host, JobSpec
from torchmuster.runfolder import RunFolder, create_run_folder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "runs", "x")


def job(folder: Path, *arguments: str, resume_with: str = "") -> JobSpec:
    return JobSpec(
        name="x",
        command=("train.py", *arguments),
        flags=("--device", "cpu", "--ranks", "2"),
        folder=str(folder),
        resume_with=tuple(shlex.split(resume_with)),
    )


def add(run: RunFolder, folder: Path, step: int, library: str, *, at_unix_s: float = 1e9) -> Path:
    """Write a whole checkpoint and its record."""
    match library:
        case "transformers":
            path = trainer_folder(folder / f"checkpoint-{step}", step=step)
        case "accelerate":
            path = accelerate_folder(folder / f"step_{step}")
        case "lightning":
            path = torch_file(folder / f"epoch=0-step={step}.ckpt")
        case _:
            path = torch_file(folder / f"step{step}.pt")
    for one in [path, *path.rglob("*")]:
        os.utime(one, (at_unix_s - 1, at_unix_s - 1))
    size = sum(one.stat().st_size for one in [path, *path.rglob("*")] if one.is_file())
    record(run, path, step, library=library, at_unix_s=at_unix_s, size=size)
    return path


# ---- which checkpoint


def test_the_newest_complete_one_is_used_and_a_torn_newer_one_is_named(
    run: RunFolder, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        add(run, tmp_path, step, "transformers", at_unix_s=1e9 + step)
    cut(tmp_path / "checkpoint-30" / "optimizer.pt")
    plan = plan_resume(job(tmp_path), run.metrics)
    assert plan.checkpoint is not None
    assert (plan.checkpoint.step, plan.checkpoint.path) == (20, str(tmp_path / "checkpoint-20"))
    ((path, found),) = plan.unusable
    assert path == str(tmp_path / "checkpoint-30")
    assert "optimizer.pt" in found.why


def test_those_that_the_script_deleted_are_not_called_torn(run: RunFolder, tmp_path: Path) -> None:
    add(run, tmp_path, 10, "torch.save")
    add(run, tmp_path, 20, "torch.save").unlink()
    found = newest_usable(read_script_checkpoints(run.metrics))
    assert found.usable is not None
    assert found.usable.step == 10
    assert found.unusable == ()


def test_a_file_that_is_overwritten_counts_once_and_when_torn_not_at_all(
    run: RunFolder, tmp_path: Path
) -> None:
    last = torch_file(tmp_path / "last.pt")
    for step in (10, 20):
        record(run, last, step, library="torch.save", size=last.stat().st_size)
    assert [one.step for one in read_script_checkpoints(run.metrics)] == [20]
    cut(last)
    found = newest_usable(read_script_checkpoints(run.metrics))
    assert found.usable is None
    assert [path for path, _ in found.unusable] == [str(last)]


def test_one_that_was_renamed_counts_once_under_its_last_name(
    run: RunFolder, tmp_path: Path
) -> None:
    final = torch_file(tmp_path / "last.pt")
    record(run, tmp_path / "last.tmp", 10, library="torch.save")
    record(run, final, 10, library="torch.save", renamed_from=tmp_path / "last.tmp")
    (checkpoint,) = read_script_checkpoints(run.metrics)
    assert (checkpoint.path, checkpoint.condition.why) == (str(final), "")


def test_small_files_of_torch_save_are_no_checkpoints(run: RunFolder, tmp_path: Path) -> None:
    path = torch_file(tmp_path / "last.pt", size=65536)
    record(run, path, 10, library="torch.save", size=path.stat().st_size)
    losses = torch_file(tmp_path / "losses.pt", size=256)
    record(run, losses, 10, library="torch.save", size=losses.stat().st_size)
    assert [one.path for one in read_script_checkpoints(run.metrics)] == [str(path)]


def test_what_only_another_host_can_see_is_taken_from_its_record(
    run: RunFolder, tmp_path: Path
) -> None:
    record(run, "/scratch/of/a/checkpoint-40", 40)
    here = job(tmp_path, "--output_dir", "out")
    assert plan_resume(here, run.metrics).checkpoint is None
    there = replace(here, hosts=(Host(name="a"), Host(name="b")))
    found = plan_resume(there, run.metrics).checkpoint
    assert found is not None
    assert found.path == "/scratch/of/a/checkpoint-40"
    assert told(run, there).why.startswith("not checked: ")


def test_lines_of_others_are_skipped(run: RunFolder) -> None:
    run.metrics.mkdir(exist_ok=True)
    (run.metrics / "saves.jsonl").write_text(
        '{"step": 5, "stall_s": 1.0, "at_unix_s": 1000.0}\n'  # of muster train
        '{"step": "x", "path": "/a", "library": "DCP", "at_unix_s": 1000.0}\n'
        '{"step": 5, "path": "/a", "library": "DCP", "at_unix_s": "now"}\n'
        '{"step": 5, "pa'
    )
    assert read_script_checkpoints(run.metrics) == []


def test_whether_a_complete_one_was_saved_after_a_request(run: RunFolder, tmp_path: Path) -> None:
    path = add(run, tmp_path, 10, "torch.save", at_unix_s=2000.0)
    assert saved_after(run.metrics, 1999.0)
    assert not saved_after(run.metrics, 2001.0)
    cut(path)
    assert not saved_after(run.metrics, 1999.0)


# ---- with which arguments

FLAG, CKPT = "--resume_from_checkpoint", "--ckpt_path"


@pytest.mark.parametrize(
    ("library", "arguments", "added"),
    [
        ("transformers", ["--output_dir", "out", FLAG, "out/checkpoint-5"], FLAG),
        ("accelerate", [f"{FLAG}=last"], FLAG),
        ("lightning", ["fit", CKPT, "last"], CKPT),
        ("transformers", ["--output_dir", "out"], None),
        ("transformers", [FLAG], None),  # a switch takes no path
        ("transformers", [FLAG, "--lr", "1"], None),
        ("lightning", ["fit"], None),
        ("torch.save", ["--resume", "last"], None),
    ],
)
def test_a_restart_sets_the_flag_of_a_library_if_the_command_has_it(
    run: RunFolder, tmp_path: Path, library: str, arguments: list[str], added: str | None
) -> None:
    path = add(run, tmp_path, 10, library)
    plan = plan_resume(job(tmp_path, *arguments), run.metrics)
    expected = () if added is None else (added, str(path))
    assert plan.on_restart() == expected


def test_what_the_user_told_is_used_whatever_the_library(run: RunFolder, tmp_path: Path) -> None:
    told = job(tmp_path, "--lr", "1", resume_with="--from '{path}' --strict")
    assert plan_resume(told, run.metrics).on_restart() == ()  # nothing to resume from yet
    path = add(run, tmp_path, 10, "torch.save")
    assert plan_resume(told, run.metrics).on_restart() == ("--from", str(path), "--strict")
    by_itself = job(tmp_path, resume_with="--auto-resume")
    assert plan_resume(by_itself, run.metrics).on_restart() == ("--auto-resume",)


def test_torchmuster_s_own_programs_have_another_way(run: RunFolder, tmp_path: Path) -> None:
    add(run, tmp_path, 10, "torch.save")
    ours = JobSpec(name="x", command=("torchmuster.worker",), module=True, folder=str(tmp_path))
    assert plan_resume(ours, run.metrics) == resume.ResumePlan()


# ---- texts


def told(run: RunFolder, spec: JobSpec) -> Finding:
    finding = resume.resume_finding(spec, plan_resume(spec, run.metrics))
    assert finding is not None
    return finding


@pytest.mark.parametrize(
    ("library", "arguments", "flag"),
    [
        ("transformers", ["--output_dir", "my out"], "--resume_from_checkpoint"),
        ("transformers", [FLAG, "last"], "--resume_from_checkpoint"),
        ("lightning", ["fit"], "--ckpt_path"),
        ("torch.save", [], None),
    ],
)
def test_the_command_that_resumes_can_be_pasted_also_from_a_run_s_record(
    run: RunFolder, tmp_path: Path, library: str, arguments: list[str], flag: str | None
) -> None:
    path = add(run, tmp_path, 1040, library)
    spec = job(tmp_path, *arguments)
    run_state.write_job(run, spec)
    recorded = run_state.read_job(run)
    assert recorded is not None
    finding = resume.resume_finding(recorded, plan_resume(recorded, run.metrics))
    assert finding == told(run, spec)
    assert finding is not None
    assert finding.name == "checkpoint-to-resume"
    (command,) = [line for line in finding.fix.splitlines() if line.startswith("muster ")]
    typed = ["muster", "run", "--device", "cpu", "--ranks", "2", "train.py", *arguments]
    assert shlex.split(command) == (typed if flag is None else [*typed, flag, str(path)])
    assert str(path) in finding.fix


@pytest.mark.parametrize(
    ("command", "module", "typed"),
    [
        (("package.train", "--lr", "1"), True, "-m package.train --lr 1 --go"),
        (("train",), False, "-- train --go"),
    ],
)
def test_modules_and_scripts_with_other_names(
    run: RunFolder, tmp_path: Path, command: tuple[str, ...], module: bool, typed: str
) -> None:
    add(run, tmp_path, 10, "torch.save")
    spec = JobSpec(
        name="x", command=command, module=module, folder=str(tmp_path), resume_with=("--go",)
    )
    assert told(run, spec).fix == f"muster run {typed}"


def test_a_run_without_a_complete_checkpoint(run: RunFolder, tmp_path: Path) -> None:
    spec = job(tmp_path)
    assert resume.resume_finding(spec, plan_resume(spec, run.metrics)) is None
    cut(add(run, tmp_path, 10, "torch.save"))
    finding = told(run, spec)
    assert finding.name == "no-complete-checkpoint"
