"""``--end-hangs-after``: a time, never, or nothing said."""

import argparse
import math

import pytest

from torchmuster.cli.job_flags import add_run_flags


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], None),
        (["--end-hangs-after", "5min"], 300.0),
        (["--end-hangs-after", "never"], math.inf),
    ],
)
def test_when_a_hang_ends_the_run(words: list[str], seconds: float | None) -> None:
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    assert parser.parse_args(words).end_hangs_after == seconds


def test_what_is_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--end-hangs-after", "soon"])
    assert "argument --end-hangs-after" in capsys.readouterr().err
