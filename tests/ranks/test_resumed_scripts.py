"""Scripts of every library whose rank 1 is killed: they resume with the printed command, and on a restart.

The scripts are in ``resumed_scripts/``. Each of them kills its rank 1 once, some steps after its last checkpoint.
"""

import json
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from muster_command import Muster, Result
from patience import GIVE_UP_S
from ranks.launched import line_with
from torchmuster.checkpoints.foreign import Completeness
from torchmuster.launch.history.script_checkpoints import read_script_checkpoints, saved_after
from torchmuster.runfolder import RunFolder, list_runs

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

SCRIPTS = Path(__file__).parent / "resumed_scripts"
_WITHIN_S = 5 * GIVE_UP_S  # two ranks import a large library, more than once, next to other tests
TWO = ("--device", "cpu", "--ranks", "2")
HF = (
    *("--output_dir", "out", "--max_steps", "12", "--save_steps", "4", "--logging_steps", "4"),
    *("--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none"),
    *("--disable_tqdm", "True"),
)
RESUME = "--resume_from_checkpoint"
# Of each library: the script's arguments, the checkpoint of step 8, the flag for it, and the last checkpoint.
LIBRARIES: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "hf_trainer": (HF, "out/checkpoint-8", RESUME, "out/checkpoint-12"),
    "lightning_trainer": (
        (),
        "out/checkpoints/epoch=0-step=8.ckpt",
        "--ckpt_path",
        "out/checkpoints/epoch=1-step=16.ckpt",
    ),
    "accelerate_loop": ((), "out/step_8", RESUME, "out/step_12"),
}


def run(
    muster: Muster, folder: Path, name: str, *flags: str, arguments: tuple[str, ...] = ()
) -> Result:
    shutil.copy(SCRIPTS / f"{name}.py", folder / "train.py")
    words = ("run", *TWO, *flags, "train.py", *arguments)
    return muster(*words, env={"COLUMNS": "400"}, timeout_s=_WITHIN_S)


def newest(folder: Path) -> RunFolder:
    return list_runs(folder / "runs")[0]


def begun(result: Result) -> list[int]:
    """Return the steps at which the attempts began."""
    found = re.findall(r"^(?:\[all 2 ranks\]|\[rank 0\])? ?begins at step (\d+)", result.out, re.M)
    return [int(step) for step in found]


def lines(run: RunFolder, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.metrics / f"{file}.jsonl").read_text().splitlines()]


def test_a_restart_resumes_as_told(muster: Muster, own_machine: Path) -> None:
    with_it = ("--max-restarts", "1", "--resume-with", "--load {path}")
    result = run(muster, own_machine, "plain", *with_it)
    assert result.code == 0, result
    assert begun(result) == [0, 8]
    assert "restarting from step 8 (restart 1 of 1)" in result.err
    assert f"--load {own_machine / 'step8.pt'}" in line_with(result.err, "added to the script's")
    # Its steps are counted on from there.
    saves = [(one["step"], Path(one["path"]).name) for one in lines(newest(own_machine), "saves")]
    assert saves == [(4, "step4.pt"), (8, "step8.pt"), (12, "step12.pt")]
    assert lines(newest(own_machine), "steps")[-1]["step"] == 12
    assert [
        one.condition.state for one in read_script_checkpoints(newest(own_machine).metrics)
    ] == [Completeness.COMPLETE] * 3


@pytest.mark.nightly
def test_a_restart_of_a_script_that_is_not_known_starts_anew_and_says_so(
    muster: Muster, own_machine: Path
) -> None:
    result = run(muster, own_machine, "plain", "--max-restarts", "1")
    assert result.code == 0, result
    assert begun(result) == [0, 0]
    assert "restarting (restart 1 of 1)" in result.err
    assert "--resume-with '--FLAG {path}'" in line_with(result.err, "starts from step 0")


@pytest.mark.nightly
def test_the_newest_complete_checkpoint_is_named_and_a_torn_one(
    muster: Muster, own_machine: Path
) -> None:
    script = (SCRIPTS / "plain.py").read_text()
    torn = (
        "Path('step99.pt').write_bytes(Path('step8.pt').read_bytes()[:900]); Path('killed').touch()"
    )
    script = script.replace('Path("killed").touch()', torn)
    (own_machine / "train.py").write_text(script)
    result = muster("run", *TWO, "train.py", env={"COLUMNS": "400"})
    assert result.code == 1, result
    assert str(own_machine / "step8.pt") in line_with(result.err, "newest complete checkpoint")
    assert "torn" in line_with(result.err, str(own_machine / "step99.pt"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_printed_command_resumes(muster: Muster, own_machine: Path, name: str) -> None:
    arguments, path, flag, last = LIBRARIES[name]
    result = run(muster, own_machine, name, arguments=arguments)
    assert result.code == 1, result
    assert begun(result) == [0]
    printed = shlex.split(line_with(result.err, "fix  muster run ").partition("fix  ")[2])
    resumes = [flag, str(own_machine / path)]
    assert printed == ["muster", "run", *TWO, "train.py", *arguments, *resumes]
    again = muster(*printed[1:], timeout_s=_WITHIN_S)
    assert again.code == 0, again
    assert begun(again) == [8]
    assert lines(newest(own_machine), "saves")[-1]["path"] == str(own_machine / last)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_restart_resumes_a_script_of_a_known_library(
    muster: Muster, own_machine: Path, name: str
) -> None:
    arguments, path, flag, last = LIBRARIES[name]
    flags = ("--max-restarts", "1", "--resume-with", f"{flag} {{path}}")
    result = run(muster, own_machine, name, *flags, arguments=arguments)
    assert result.code == 0, result
    assert begun(result) == [0, 8]
    assert "restarting from step 8 (restart 1 of 1)" in result.err
    assert f"{flag} {own_machine / path}" in line_with(result.err, "added to the script's")
    saved = lines(newest(own_machine), "saves")[-1]
    assert saved["path"] == str(own_machine / last)
    assert saved["step"] == int(re.findall(r"\d+", last)[-1])
    if name == "hf_trainer":
        trained = json.loads(
            (own_machine / "out" / "checkpoint-12" / "trainer_state.json").read_text()
        )
        assert trained["global_step"] == 12
        assert [one["step"] for one in trained["log_history"] if "loss" in one] == [4, 8, 12]


@pytest.mark.nightly
def test_a_checkpoint_after_a_stop_request_is_recorded(muster: Muster, own_machine: Path) -> None:
    script = str(SCRIPTS / "hf_preempted.py")
    began = time.time()
    result = muster("run", "--device", "cpu", script, timeout_s=_WITHIN_S)
    assert result.code == 0, result
    metrics = newest(own_machine).metrics
    (saved,) = read_script_checkpoints(metrics)
    assert saved.path == str(own_machine / "out" / f"checkpoint-{saved.step}")
    assert saved.step > 2
    assert saved_after(metrics, began)
    assert not saved_after(metrics, time.time())
