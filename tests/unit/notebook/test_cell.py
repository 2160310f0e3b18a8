"""A cell in a rank: its value as text, and tracebacks that show the user's lines alone."""

import inspect
from typing import Any

import pytest

from torchmuster.notebook import cell
from torchmuster.notebook.messages import Done, Run


def run_cell(code: str, name: str, space: dict[str, Any]) -> Done:
    return cell.run_cell(Run(request=1, name=name, code=code), space)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("x = 5\nx", "5"),
        ("x = 5", ""),
        ("5;", ""),
        ("5;  # a semicolon hides the value", ""),
        ("5  # no semicolon;", "5"),
        ("None", ""),
        ("", ""),
        ("# only a word", ""),
        ("'a\\nb'", "'a\\nb'"),
        ("{'b': 1, 'a': 2}", "{'b': 1, 'a': 2}"),
    ],
)
def test_the_last_expression_is_the_value(code: str, value: str) -> None:
    assert run_cell(code, "cell-1", {}).value == value


def test_names_stay_and_the_last_value_has_one() -> None:
    space: dict[str, Any] = {}
    run_cell("def f(): return 3", "cell-1", space)
    assert run_cell("f()", "cell-2", space).value == "3"
    assert space["_"] == 3
    assert inspect.getsource(space["f"]) == "def f(): return 3"


def test_a_long_value_is_cut_and_counted() -> None:
    value = run_cell("'x' * 30_000", "cell-1", {}).value
    assert value.endswith("… 10,002 more characters")


def test_a_traceback_has_the_lines_of_cells_and_the_innermost_one() -> None:
    space: dict[str, Any] = {}
    run_cell("import json\ndef f():\n    json.loads('{')", "cell-1", space)
    error = run_cell("x = 1\nf()", "cell-2", space).error
    places = [line.strip() for line in error.splitlines() if line.strip().startswith("File")]
    assert places[0] == 'File "cell-2", line 2, in <module>'
    assert places[1] == 'File "cell-1", line 3, in f'
    assert "decoder.py" in places[2]
    assert len(places) == 3
    assert "    json.loads('{')" in error
    assert error.splitlines()[-1].startswith("json.decoder.JSONDecodeError: Expecting")


def test_causes_are_shortened_as_well() -> None:
    code = (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('no') from error"
    )
    error = run_cell(code, "cell-1", {}).error
    assert "ZeroDivisionError: division by zero" in error
    assert error.endswith("ValueError: no")
    assert "cell.py" not in error


def test_a_mistake_in_the_text_is_shown_where_it_is() -> None:
    error = run_cell("x = 1\n1 +", "cell-7", {}).error
    assert 'File "cell-7", line 2' in error
    assert error.endswith("SyntaxError: invalid syntax")
    assert "torchmuster" not in error


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "exit()", "raise GeneratorExit"])
def test_a_cell_does_not_end_its_rank(code: str) -> None:
    assert run_cell(code, "cell-1", {"exit": exit}).error


def test_an_interrupt_is_known_as_one() -> None:
    outcome = run_cell("raise KeyboardInterrupt", "cell-1", {})
    assert outcome.interrupted
    assert outcome.error.endswith("KeyboardInterrupt")


def test_a_value_that_cannot_be_shown_is_an_error_of_the_cell() -> None:
    code = "class A:\n    def __repr__(self): raise ValueError('hidden')\nA()"
    assert run_cell(code, "cell-1", {}).error.endswith("ValueError: hidden")
