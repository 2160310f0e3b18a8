"""Where ``muster join`` reads its code, and what it says about it."""

import io

import pytest

from torchmuster.cli import join

CODE = "x" * 70


def test_the_code_comes_from_a_pipe_or_the_environment_which_the_ranks_do_not_get(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{CODE}\n"))
    assert join._read_code(None).strip() == CODE
    monkeypatch.setenv(join.CODE_VARIABLE, CODE)
    assert join._read_code(None) == CODE
    assert join.CODE_VARIABLE not in join.os.environ
    assert capsys.readouterr().err == ""


def test_a_code_on_the_command_line_works_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert join._read_code(CODE) == CODE
    assert "other users of this machine can see the code" in capsys.readouterr().err


def test_a_prompt_does_not_show_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda prompt: CODE)
    assert join._read_code(None) == CODE
