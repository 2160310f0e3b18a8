"""Copies of the working folder: what is copied, linked and empty, and how paths of the command fit."""

from pathlib import Path

import pytest

from torchmuster.prove.workspace import Workspace, output_arguments


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    here = tmp_path / "project"
    for name in ("out", "data", "prove/old", ".git", "pkg"):
        (here / name).mkdir(parents=True)
    (here / "train.py").write_text("print()\n")
    (here / "pkg" / "model.py").write_text("")
    (here / "out" / "last.pt").write_text("of an earlier run")
    (here / "data" / "large.bin").touch()
    with (here / "data" / "large.bin").open("r+b") as file:
        file.truncate(17 * 2**20)
    return here


def workspace(folder: Path, *command: str, outputs: tuple[str, ...] = ()) -> Workspace:
    return Workspace(
        folder=folder,
        command=("train.py", *command),
        module=False,
        outputs=outputs,
        within=folder / "prove" / "new" / "trials",
        reports=folder / "prove",
    )


def copied(workspace: Workspace) -> tuple[Path, tuple[str, ...]]:
    copy = workspace.copy("baseline")
    return copy, workspace.command_in(copy)


def test_small_files_are_copied_and_large_folders_linked(folder: Path) -> None:
    copy, command = copied(workspace(folder))
    assert command == ("train.py",)
    assert (copy / "train.py").read_text() == "print()\n"
    assert not (copy / "train.py").is_symlink()
    assert (copy / "data").is_symlink()
    assert (copy / "pkg" / "model.py").exists()
    assert (copy / "out" / "last.pt").exists()  # nothing says that it is an output
    assert not (copy / ".git").exists()
    assert not (copy / "prove").exists()


def test_only_real_run_folders_are_left_out(folder: Path) -> None:
    """A source or data folder may be called like one; a virtual environment is linked as any large folder."""
    for file in ("runs/__init__.py", "venv/pyvenv.cfg", "wandb/data.csv", "mlruns/0/meta.yaml"):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("")
    copy, _ = copied(workspace(folder))
    assert (copy / "runs" / "__init__.py").is_file()
    assert (copy / "wandb" / "data.csv").is_file()
    assert (copy / "venv" / "pyvenv.cfg").is_file()
    assert not (copy / "mlruns").exists()


@pytest.mark.parametrize(
    ("command", "outputs"),
    [(("--output_dir", "out"), ()), (("--output-dir=out",), ()), ((), ("out",))],
)
def test_output_folders_start_empty(
    folder: Path, command: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    copy, words = copied(workspace(folder, *command, outputs=outputs))
    assert list((copy / "out").iterdir()) == []
    assert words[1:] == command
    assert (folder / "out" / "last.pt").read_text() == "of an earlier run"


def test_an_output_file_is_no_folder_and_an_input_file_is_kept(folder: Path) -> None:
    (folder / "pretrained.ckpt").write_text("weights")
    command = ("--save_path", "new/model.pt", "--ckpt_path", "pretrained.ckpt")
    copy, words = copied(workspace(folder, *command, outputs=("out/last.pt",)))
    assert words[1:] == command
    assert (copy / "new").is_dir()
    assert not (copy / "new" / "model.pt").exists()
    assert (copy / "pretrained.ckpt").read_text() == "weights"
    assert list((copy / "out").iterdir()) == []


def test_an_output_beside_the_folder_moves_into_the_copy(folder: Path) -> None:
    copy, words = copied(workspace(folder, "--output_dir", "../results"))
    assert Path(words[2]).is_relative_to(copy)
    assert Path(words[2]).is_dir()


def test_absolute_outputs_move_into_the_copy_and_relative_inputs_stay(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    data = folder.parent / "texts"
    data.mkdir()
    command = ("--output_dir", str(elsewhere / "run"), "--texts", "../texts", "--lr", "1e-4")
    copy, words = copied(workspace(folder, *command))
    moved = Path(words[2])
    assert moved.is_relative_to(copy)
    assert moved.is_dir()
    assert words[4:] == (str(data), "--lr", "1e-4")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--output_dir", "a", "--lr", "1"], ["a"]),
        (["--out=b"], ["b"]),
        (["--save-dir", "c"], ["c"]),
        (["--trainer.default_root_dir", "d"], ["d"]),
        (["run_dir=e"], ["e"]),
        (["--output_dir", "--flag"], []),
        (["--log_every", "5", "--model", "x"], []),
    ],
)
def test_arguments_that_name_an_output_folder(words: list[str], found: list[str]) -> None:
    assert output_arguments(words) == found
