"""Where the flags of a command end and its script begins, and what typed options and jobs come of them."""

import dataclasses
import math
from pathlib import Path

import pytest

from torchmuster.cli import jobs, main
from torchmuster.cli.launch_options import RunOptions, TrainOptions
from torchmuster.cli.options import FOREVER_S, read_options, split_command_line
from torchmuster.cli.scripts import script_of
from torchmuster.cli.setting_options import settings_of
from torchmuster.config.layers import Flag
from torchmuster.errors import ConfigError, Impossible
from torchmuster.launch.job import JobSpec, NodeCounts

SPEC = JobSpec(name="x", command=("x.py",), folder="/x", spares=2)


def run_options(*words: str) -> RunOptions:
    own, script = split_command_line(main.command_of("run"), words)
    parsed = main.root_parser(only="run").parse_args(["run", *own])
    return read_options(RunOptions, parsed, command_line=("run", *own), script=tuple(script))


@pytest.mark.parametrize(
    ("words", "own", "script"),
    [
        ("train.py --lr 1", "", "train.py --lr 1"),
        ("--gpu-ids 0,2 train.py 3", "--gpu-ids=0,2", "train.py 3"),
        ("--share code/train.py --share", "--share", "code/train.py --share"),
        ("-m pkg.train -m x", "", "-m pkg.train -m x"),
        ("--ranks 2 -- train --ranks 3", "--ranks=2", "train --ranks 3"),
        ("train.py -- more", "", "train.py -- more"),
        ("--env A=b.py train.py", "--env=A=b.py", "train.py"),
        ("--name x.py --dry-run train.py a.py", "--name=x.py --dry-run", "train.py a.py"),
        ("--hosts a,b:2 train.py", "--hosts=a,b:2", "train.py"),
        ("--nproc_per_node 2 train", "--nproc_per_node=2", "train"),
        ("--wait train.py", "--wait", "train.py"),
        ("--wait=10m 10.py", "--wait=10m", "10.py"),
        ("--resume-with --from train.py", "--resume-with=--from", "train.py"),
        ("--ranks 2", "--ranks=2", ""),
    ],
)
def test_everything_from_the_script_on_belongs_to_it(words: str, own: str, script: str) -> None:
    split = split_command_line(main.command_of("run"), words.split())
    assert split == (own.split(), script.split())


@pytest.mark.parametrize(
    ("words", "own", "script"),
    [
        ("--json pick --num-gpus 1 python -c 1", "--json pick --num-gpus=1", "python -c 1"),
        ("pick -- sh -c x", "pick", "sh -c x"),
        ("--json", "--json", ""),
    ],
)
def test_an_action_may_follow_flags(words: str, own: str, script: str) -> None:
    split = split_command_line(main.command_of("gpus"), words.split())
    assert split == (own.split(), script.split())


def test_flags_become_typed_options() -> None:
    options = run_options(
        *("--ranks", "2", "--hosts", "a,b:4", "--nodes", "1:2", "--wait=10m", "--env", "A=1"),
        *("--env", "B", "--resume-with", "--from '{path}'", "--set", "train.steps=3", "x.py", "-y"),
    )
    assert options.ranks == 2
    assert options.hosts == ("a", "b:4")
    assert options.nodes == NodeCounts(least=1, most=2)
    assert options.wait == 600.0
    assert options.env == ("A=1", "B")
    assert options.resume_with == ("--from", "{path}")
    assert options.set == (Flag(flag="--set train.steps", path="train.steps", text="3"),)
    assert options.script == ("x.py", "-y")
    assert run_options("--wait", "x.py").wait == FOREVER_S
    assert run_options("--nnodes", "2", "--nproc-per-node", "3", "x.py").ranks == 3


def test_train_takes_gpu_ids_with_spaces() -> None:
    words = ["train", "--gpu-ids", "0", "2", "3", "--device", "gpu"]
    options = read_options(TrainOptions, main.root_parser(only="train").parse_args(words))
    assert options.gpu_ids == "0,2,3"


def refused(folder: Path, *words: str) -> Impossible:
    with pytest.raises(Impossible) as caught:
        script_of(words, folder)
    return caught.value


def test_a_script_is_a_file_a_module_or_a_folder_with_main(tmp_path: Path) -> None:
    script = script_of(["-m", "package.deep.train", "--lr", "1"], tmp_path)
    assert script.command == ("package.deep.train", "--lr", "1")
    assert (script.module, script.name) == (True, "train")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").touch()
    assert script_of(["folder", "x"], tmp_path).command == ("folder", "x")


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").touch()
    assert "train.py" in refused(tmp_path).fix
    assert "'folder'" in refused(tmp_path, "folder").what
    assert "package.module" in refused(tmp_path, "-m").fix
    assert refused(tmp_path, "train").fix == "muster run train.py"
    assert "--hosts a,b" in refused(tmp_path, "b").fix


@pytest.mark.parametrize(
    ("setting", "limit", "seconds"),
    [
        ("launch.grace=90", "grace_s", 90.0),
        ("launch.grace=1.5m", "grace_s", 90.0),
        ("launch.join_timeout=30m", "join_s", 1800.0),
        ("launch.lost_after=20s", "lost_after_s", 20.0),
        ("launch.end_hangs_after=5min", "end_hangs_s", 300.0),
        ("launch.end_hangs_after=never", "end_hangs_s", math.inf),
    ],
)
def test_settings_are_the_time_limits_of_a_run(setting: str, limit: str, seconds: float) -> None:
    resolved = settings_of(run_options("--set", setting, "x.py"))
    assert getattr(jobs.limits_of(resolved), limit) == seconds


@pytest.mark.parametrize("setting", ["launch.grace=soon", "launch.lost_after=-1"])
def test_what_is_no_duration_is_refused(setting: str) -> None:
    with pytest.raises((ConfigError, Impossible), match=setting.partition("=")[2]):
        jobs.limits_of(settings_of(run_options("--set", setting, "x.py")))


def test_a_silence_shorter_than_two_heartbeats_is_refused() -> None:
    resolved = settings_of(run_options("--set", "launch.lost_after=1s", "x.py"))
    with pytest.raises(Impossible, match=r"launch.lost_after 1s is too short"):
        jobs.limits_of(resolved)


def test_spares_and_fewer_hosts_need_restarts() -> None:
    assert jobs.with_host_counts(SPEC, None, 3).max_restarts == jobs.USUAL_RESTARTS
    given = dataclasses.replace(SPEC, max_restarts=7)
    assert jobs.with_host_counts(given, None, 3).max_restarts == 7
    alone = dataclasses.replace(SPEC, spares=0)
    assert jobs.with_host_counts(alone, NodeCounts(least=1, most=1), 1) == alone
    elastic = jobs.with_host_counts(SPEC, NodeCounts(least=2, most=4), 6)
    assert (elastic.min_nodes, elastic.spares, elastic.max_restarts) == (2, 2, 3)


@pytest.mark.parametrize(
    ("nodes", "hosts", "what", "fix"),
    [
        (None, 2, "3 hosts wanted, 2 known", "--hosts a,b,…"),
        (NodeCounts(least=2, most=4), 4, "6 hosts wanted, 4 known", "--nodes 2:2, or"),
        (NodeCounts(least=4, most=4), 1, "6 hosts wanted, 1 known", "--join --nodes"),
    ],
)
def test_counts_of_hosts_that_do_not_fit_are_refused(
    nodes: NodeCounts | None, hosts: int, what: str, fix: str
) -> None:
    with pytest.raises(Impossible) as caught:
        jobs.with_host_counts(SPEC, nodes, hosts)
    assert caught.value.what == what
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    "name",
    [
        "CUBLAS_WORKSPACE_CONFIG",
        "FI_PROVIDER",
        "PYTORCH_HIP_ALLOC_CONF",
        "TORCH_FR_BUFFER_SIZE",
        "UCX_TLS",
    ],
)
def test_variables_that_all_hosts_need_are_forwarded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")  # of one host's GPU
    variables = jobs.environment_of(run_options("x.py"))
    assert variables[name] == "1"
    assert "HSA_OVERRIDE_GFX_VERSION" not in variables
