"""The program on each machine: JSON lines in, JSON lines out, one question after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from patience import GIVE_UP_S
from torchmuster.finding import Status

_PROGRAM = [sys.executable, "-m", "torchmuster.diagnose.host_probe"]


def talk(*lines: str, **environment: str) -> list[dict[str, Any]]:
    """Say lines to a real examiner, end its input when all are answered, and return the answers."""
    with subprocess.Popen(
        _PROGRAM,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(f"{line}\n" for line in lines))
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in lines]
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait(GIVE_UP_S) == 0
    return answers


def test_it_answers_line_by_line_and_ends_with_its_input() -> None:
    asked = json.dumps({"id": 1, "verb": "dance", "argument": None})
    answers = {one["id"]: one["error"] for one in talk(asked, "not JSON", "[]")}
    assert answers[1]["what"] == "unknown verb 'dance'"
    assert set(answers) == {1, None}


def test_the_machine_is_examined_check_by_check_without_torch(tmp_path: Path) -> None:
    """A torch that cannot be imported does not matter: nobody imports it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    asked = json.dumps({"id": 1, "verb": "examine", "argument": str(tmp_path)})
    (told,) = talk(asked, PYTHONPATH=str(tmp_path))
    findings = told["answer"]
    assert len(findings) > 10
    for finding in findings:
        assert set(finding) == {"name", "status", "what", "why", "fix", "evidence"}
        Status(finding["status"])
        assert finding["name"] not in ("check-failed", "check-hangs"), finding
