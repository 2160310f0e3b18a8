"""The tree of errors: what a script's exit status, a log and an ``except`` clause rely on."""

import pickle
import re
from collections.abc import Iterator

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster import errors
from torchmuster.errors import (
    EXIT_CODE_MEANINGS,
    ConfigError,
    CudaAlreadyInitialized,
    DevicesBusy,
    ExitCode,
    Impossible,
    MachineLost,
    Mistake,
    MusterError,
    NoSuchDevice,
    NoSuchRun,
    NotNow,
    OutOfMemory,
    TooFewDevices,
)

EXIT_CODES = {
    MusterError: 1,
    Impossible: 2,
    ConfigError: 2,
    NoSuchDevice: 2,
    TooFewDevices: 2,
    CudaAlreadyInitialized: 2,
    NoSuchRun: 2,
    MachineLost: 1,
    OutOfMemory: 1,
    NotNow: 3,
    DevicesBusy: 3,
}


def tree(kind: type[MusterError], depth: int = 0) -> Iterator[tuple[int, str, int]]:
    """Yield depth, name and exit code of an error class and all below it."""
    yield depth, kind.__name__, kind.exit_code
    for child in kind.__subclasses__():
        if (
            child.__module__ == errors.__name__
        ):  # not RankFailure, which only the trainer's code handles
            yield from tree(child, depth + 1)


def drawn_tree() -> Iterator[tuple[int, str, int]]:
    """Read the same out of the module's docstring; a class without a code has its parent's."""
    codes: list[int] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"    ([ │├└─]*)([A-Z]\w+) +(?:exit (\d) +)?(\S.*)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        codes[depth:] = [int(match[3]) if match[3] else codes[depth - 1]]
        yield depth, match[2], codes[depth]


def test_every_error_ends_a_command_with_its_exit_code() -> None:
    known = {name: code for _, name, code in tree(MusterError)}
    assert known == {kind.__name__: code for kind, code in EXIT_CODES.items()}


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    assert sorted(drawn_tree()) == sorted(tree(MusterError))


def test_the_order_of_the_drawing_puts_each_class_below_its_parent() -> None:
    parents: list[str] = []
    for depth, name, _ in drawn_tree():
        kind: type[MusterError] = getattr(errors, name)
        parents[depth:] = [name]
        if depth:
            assert [base.__name__ for base in kind.__bases__] == [parents[depth - 1]]


def test_every_exit_code_is_explained() -> None:
    assert set(EXIT_CODE_MEANINGS) == set(ExitCode)
    assert all(EXIT_CODE_MEANINGS.values())
    assert [code.value for code in ExitCode] == [0, 1, 2, 3, 75, 130, 137, 143]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MusterError("a"), "a"),
        (MusterError("a", why="b"), "a\nb"),
        (MusterError("a", fix="c"), "a\nc"),
        (NoSuchRun("a", why="b", fix="c"), "a\nb\nc"),
    ],
)
def test_the_text_is_what_why_and_fix(error: MusterError, text: str) -> None:
    assert str(error) == text


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (MusterError(""), "muster-error"),
        (NoSuchDevice(""), "no-such-device"),
        (CudaAlreadyInitialized(""), "cuda-already-initialized"),
        (ConfigError([]), "config-error"),
    ],
)
def test_programs_know_an_error_by_a_stable_name(error: MusterError, name: str) -> None:
    assert error.name == name


def test_one_wrong_setting_in_words(snapshot: SnapshotAssertion) -> None:
    error = ConfigError([Mistake(where="c.yaml:3:5", what="is wrong", fix="mend it")])
    assert str(error).splitlines()[1:] == ["c.yaml:3:5: is wrong; mend it"]
    assert str(error) == snapshot


def test_several_wrong_settings_in_words(snapshot: SnapshotAssertion) -> None:
    error = ConfigError([Mistake(where="$X", what="is wrong"), Mistake(where="--y", what="too")])
    assert str(error).splitlines()[1:] == ["$X: is wrong", "--y: too"]
    assert str(error) == snapshot


@pytest.mark.parametrize(
    "error",
    [
        NoSuchRun("a", why="b", fix="c"),
        ConfigError([Mistake(where="$X", what="is wrong"), Mistake(where="--y", what="too")]),
    ],
)
def test_an_error_crosses_from_one_process_to_another(error: MusterError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
