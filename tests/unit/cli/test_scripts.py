"""Where a command line ends and the script's own begins, and what is said when there is no script."""

import argparse
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.cli import job_flags, main
from torchmuster.cli.scripts import script_from, split_off, with_joined_values
from torchmuster.errors import Impossible


@pytest.mark.parametrize(
    ("words", "ours", "script"),
    [
        ("run train.py --lr 1", "run", "train.py --lr 1"),
        ("run --gpu-ids 0 2 train.py 3", "run --gpu-ids 0 2", "train.py 3"),
        ("run --share code/train.py --share", "run --share", "code/train.py --share"),
        ("run -m pkg.train -m x", "run", "-m pkg.train -m x"),
        ("run --ranks 2 -- train --ranks 3", "run --ranks 2", "train --ranks 3"),
        ("run train.py -- more", "run", "train.py -- more"),
        ("run --env A=b.py train.py", "run --env A=b.py", "train.py"),
        ("run --name x.py --dry-run train.py a.py", "run --name x.py --dry-run", "train.py a.py"),
        ("run --env=A=b.py train.py", "run --env=A=b.py", "train.py"),
        ("run --hosts a b:2 train.py", "run --hosts a b:2", "train.py"),
    ],
)
def test_everything_from_the_script_on_is_its_own(words: str, ours: str, script: str) -> None:
    before, after = split_off(words.split())
    assert " ".join(before) == ours
    assert after is not None
    assert " ".join(after) == script


@pytest.mark.parametrize(
    ("words", "resume_with"),
    [
        (["--resume-with", "--resume", "train.py"], ("--resume",)),
        (["--resume-with", "-m {path}", "train.py"], ("-m", "{path}")),
        (["--resume-with=--from 'a b/{path}'", "train.py"], ("--from", "a b/{path}")),
        (["train.py", "--resume-with", "--x"], ()),
    ],
)
def test_arguments_to_resume_may_look_like_flags_of_ours(
    words: list[str], resume_with: tuple[str, ...]
) -> None:
    before, after = split_off(["run", *words])
    assert after is not None
    assert after[0] == "train.py"
    options = main.root_parser(only="run").parse_args(with_joined_values(before))
    assert options.resume_with == resume_with


@pytest.mark.parametrize(
    ("words", "wait_s"),
    [
        (["--wait", "10m"], 600.0),
        (["--wait=10m"], 600.0),
        (["--wait"], job_flags.FOREVER_S),
        (["--wait", "./train.sh"], job_flags.FOREVER_S),
    ],
)
def test_wait_takes_only_a_duration(words: list[str], wait_s: float) -> None:
    joined = with_joined_values(["run", *words])
    options, _ = main.root_parser(only="run").parse_known_args(joined)
    assert options.wait == wait_s


def test_a_command_line_without_a_script_is_all_ours() -> None:
    assert split_off(["run", "--ranks", "2"]) == (["run", "--ranks", "2"], None)


@pytest.mark.parametrize(
    "command",
    sorted(main._TAKE_SCRIPT),
)
def test_a_flag_s_value_is_never_taken_for_the_script(command: str) -> None:
    # Every flag that takes one free text, whatever is added to them later.
    names = command.split()
    ours = main.root_parser(only=names[0])
    for name in names:
        (commands,) = [one for one in ours._actions if isinstance(one, argparse._SubParsersAction)]
        ours = commands.choices[name]
    set_ = ours._option_string_actions.get("--set")
    texts = (None, str, Path, set_.type if set_ else None)
    flags = [
        action.option_strings[-1]
        for action in ours._actions
        # A number or a duration does not end in .py.
        if action.option_strings and action.type in texts and action.metavar != "N"
        if action.nargs is None and action.choices is None
    ]
    expected = {
        "check": {"--env", "--html"},
        "kubernetes": {"--name", "--namespace"},
        "profile": {"--set", "--out"},
    }
    assert expected.get(command, {"--env", "--name"}) <= set(flags)
    for flag in flags:
        words = [*names, flag, "x.py"]
        assert split_off([*words, "train.py"]) == (words, ["train.py"])


def options(*words: str, stray: tuple[str, ...] = ()) -> argparse.Namespace:
    return argparse.Namespace(command=list(words), stray=list(stray))


def refused(folder: Path, given: argparse.Namespace) -> Impossible:
    with pytest.raises(Impossible) as caught:
        script_from(given, folder)
    return caught.value


def test_a_script_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    script = script_from(options("code/train.py", "--lr", "1"), tmp_path)
    assert (script.command, script.module, script.name) == (
        ("code/train.py", "--lr", "1"),
        False,
        "train",
    )


@pytest.mark.parametrize("module", ["beside", "package.deep.train", "json.tool", "torchmuster"])
def test_a_module_here_or_installed(tmp_path: Path, module: str) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "package").mkdir()
    script = script_from(options("-m", module, "--lr", "1"), tmp_path)
    assert script.command == (module, "--lr", "1")
    assert script.module
    assert script.name == module.rpartition(".")[2]


def test_a_module_that_is_nowhere_is_refused_before_anything_starts(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    for words in (["-m", "trian.main"], ["-m", ".train"], ["-m"]):
        error = refused(tmp_path, options(*words))
        assert words[-1] in error.what
        assert error == snapshot


def test_no_script_at_all(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    error = refused(tmp_path, options())
    assert error.fix.startswith("muster run train.py ")
    assert error == snapshot


def test_a_script_that_is_not_there(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    error = refused(tmp_path, options("trian.py"))
    assert str(tmp_path) in error.why
    assert error == snapshot


def test_a_folder_is_no_script(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "code.py").mkdir()
    error = refused(tmp_path, options("code.py"))
    assert error.fix.endswith("muster run code.py/train.py")
    assert error == snapshot


@pytest.mark.parametrize(
    ("file", "fix"),
    [
        ("train.py", "muster run train.py"),
        ("train", "muster run -- train"),
        ("other", "muster run train.py"),
    ],
)
def test_a_word_that_is_no_script_is_shown_the_way(
    tmp_path: Path, file: str, fix: str, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / file).touch()
    error = refused(tmp_path, options(stray=("train",)))
    assert error.fix.partition("  #")[0] == fix
    assert error == snapshot


def test_a_script_with_another_name_follows_two_dashes(tmp_path: Path) -> None:
    (tmp_path / "train").touch()
    assert script_from(options("train", "1"), tmp_path).command == ("train", "1")
