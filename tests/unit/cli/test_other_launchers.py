"""Commands of torchrun and python in ``muster run``: what becomes of every flag."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.cli import torchrun_flags
from torchmuster.cli.other_launchers import muster_words
from torchmuster.cli.torchrun_flags import TORCHRUN_FLAGS, flag_named, flag_table
from torchmuster.errors import Impossible

# Of torch.distributed.run.get_args_parser() in 2.15.0; tests/engine compares with the installed one.
FLAGS_OF_2_15 = [
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--standalone",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--module",
    "--no-python",
    "--run-path",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--log-line-prefix-template",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
    "--virtual-local-rank",
    "--print-completion",
]


@pytest.fixture
def folder(own_machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (own_machine / "train.py").write_text("print('training')\n")
    # The Python of this test is the one that `python` means.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return own_machine


Translate = Callable[..., str]


@pytest.fixture
def translated(folder: Path) -> Translate:
    """Return the whole command of muster for a command line."""

    def call(line: str, **environment: str) -> str:
        words, command = muster_words(["run", *line.split()], environment, folder)
        more = " ".join(f"{name}={value}" for name, value in environment.items())
        shown = " ".join([*words, "|", *(command or [])])
        return f"{more} {shown}" if "VISIBLE" in more else shown

    return call


def test_every_flag_of_torchrun_is_in_the_table_once() -> None:
    names = [flag.name for flag in TORCHRUN_FLAGS]
    assert sorted(names) == sorted([*FLAGS_OF_2_15, "--use-env"])
    for name in FLAGS_OF_2_15:
        spelled = flag_named(f"--{name[2:].replace('-', '_')}")
        assert spelled is not None
        assert spelled is flag_named(name)


def test_the_table_for_the_docs(snapshot: SnapshotAssertion) -> None:
    assert "\n".join(flag_table()) == snapshot


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # torchrun's flags among muster's
        ("--nproc-per-node 2 train.py", "run --ranks 2 | train.py"),
        ("--nproc_per_node=2 train.py --lr 1", "run --ranks 2 | train.py --lr 1"),
        ("--nproc-per-node gpu train.py", "run --device gpu | train.py"),
        ("--standalone --nnodes 1 --node_rank 0 train.py", "run | train.py"),
        ("--nnodes 1:1 train.py", "run | train.py"),
        ("--hosts a,b --nnodes 1:2 train.py", "run --nodes 1:2 --hosts a,b | train.py"),
        ("--max_restarts 3 train.py", "run --max-restarts 3 | train.py"),
        ("--num_gpus 2 train.py", "run --num-gpus 2 | train.py"),
        ("--master-port 29501 train.py", "run --port 29501 | train.py"),
        ("--master-addr localhost --master-port 0 train.py", "run | train.py"),
        ("--rdzv-backend static train.py", "run | train.py"),
        ("--rdzv-backend c10d train.py", "run | train.py"),
        ("--rdzv-endpoint localhost:0 train.py", "run | train.py"),
        ("--rdzv-endpoint a train.py", "run | train.py"),
        (
            "--rdzv-backend etcd --rdzv-endpoint e:2379 train.py",
            "run | train.py",
        ),
        ("--rdzv-conf join_timeout=300,x=1 train.py", "run --join-timeout 300s | train.py"),
        ("--rdzv-conf read_timeout=300 train.py", "run | train.py"),
        ("--shutdown-timeout 60 train.py", "run --grace 60s | train.py"),
        ("--log-dir /data/logs train.py", "run --runs /data/logs | train.py"),
        ("--tee 3 -r 3 --role r --run-path train.py", "run --env ROLE_NAME=r | train.py"),
        ("--rdzv-id job.py train.py", "run | train.py"),
        ("--module package.train --lr 1", "run | -m package.train --lr 1"),
        # what is typed for muster wins
        ("--ranks 4 --nproc-per-node 2 train.py", "run --ranks 4 | train.py"),
        # torchrun, pasted whole
        ("torchrun --nproc_per_node=2 train.py --lr 1", "run --ranks 2 | train.py --lr 1"),
        ("torchrun train.py", "run --ranks 1 | train.py"),
        ("--num-gpus 2 torchrun train.py", "run --num-gpus 2 | train.py"),
        ("torchrun --nproc 2 -t3 -- train.py", "run --ranks 2 | train.py"),
        ("torchrun -m --nproc-per-node 2 package.train x", "run --ranks 2 | -m package.train x"),
        ("/opt/bin/torchrun --nproc-per-node 2 train.py", "run --ranks 2 | train.py"),
        ("-- torchrun --nproc-per-node 2 train.py", "run --ranks 2 | train.py"),
        ("torchrun --nproc-per-node 2 --no-python python -u train.py", "run --ranks 2 | train.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "run --ranks 2 | train.py"),
        ("python -m torch.distributed.launch --use_env train.py", "run --ranks 1 | train.py"),
        pytest.param(
            "--hosts a,b torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint [fd00::1]:29400 train.py",
            "run --address fd00::1 --port 29400 --nodes 2 --ranks 4 --hosts a,b | train.py",
            id="IPv6",
        ),
        (
            "--hosts a,b torchrun --nnodes 2 --master-addr a --nproc-per-node 4 train.py",
            "run --nodes 2 --ranks 4 --hosts a,b | train.py",
        ),
        # python
        ("python train.py --lr 1", "run | train.py --lr 1"),
        ("python3 -u -m package.train", "run | -m package.train"),
        ("python -O -W ignore train.py", "run --env PYTHONWARNINGS=ignore --env PYTHONOPTIMIZE=1 | train.py"),
        # variables in front
        ("OMP_NUM_THREADS=1 torchrun train.py", "run --ranks 1 --env OMP_NUM_THREADS=1 | train.py"),
        ("env PET_NPROC_PER_NODE=2 torchrun train.py", "run --ranks 2 | train.py"),
        (
            "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node 2 train.py",
            "CUDA_VISIBLE_DEVICES=0,1 run --ranks 2 | train.py",
        ),
        # no launcher: names and values of muster's own flags, and arguments of the script
        ("--name python --env A=torchrun train.py torchrun", "run --name python --env A=torchrun | train.py torchrun"),
    ],
)  # fmt: skip
def test_a_command_line_becomes_one_of_muster(
    translated: Translate,
    line: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    snapshot: SnapshotAssertion,
) -> None:
    assert translated(line) == expected
    assert capsys.readouterr().err == snapshot


@pytest.mark.parametrize("value", ["cpu", "auto"])
def test_a_rank_on_each_core_where_there_are_no_gpus(translated: Translate, value: str) -> None:
    cores = len(os.sched_getaffinity(0))
    expected = f"run --device cpu --ranks {cores} | train.py"
    assert translated(f"--nproc-per-node {value} train.py") == expected


def test_a_rank_on_each_gpu_where_there_are_some(
    translated: Translate, machine: Callable[[Scenario], Path]
) -> None:
    machine(scenarios.eight_a100_idle())
    assert translated("--nproc-per-node auto train.py") == "run --device auto | train.py"


def test_variables_of_torchrun_are_its_defaults(
    translated: Translate, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeflow = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "0"}
    assert translated("train.py", **kubeflow) == "run --ranks 2 | train.py"
    assert capsys.readouterr().err == "muster: PET_NPROC_PER_NODE=2: --ranks 2\n"
    flag = "torchrun --nproc-per-node 4 train.py"
    assert translated(flag, **kubeflow) == "run --ranks 4 | train.py"
    assert translated("--hosts a,b train.py", PET_NNODES="2").startswith("run --nodes 2 ")


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("torchrun --nnodes 2 --node-rank 1 --rdzv-endpoint a:29400 train.py", "--hosts a,b"),
        ("--node-rank 1 train.py", "muster run --join --nodes"),
        ("--nproc-per-node many train.py", "--nproc-per-node 2"),
        ("--virtual-local-rank train.py", "LOCAL_RANK"),
        ("torchrun --print-completion bash", "muster completion bash"),
        ("torchrun --no-python ./train.sh", "muster run train.py"),
        ("--no-python ./train.sh", "muster run train.py"),
        ("torchrun --nproc-per-nodes 2 train.py", "--nproc-per-node?"),
        ("torchrun --lr 2 train.py", "torchrun --help"),
        ("torchrun --help", "muster run --help"),
        ("torchrun --nproc-per-node", "--nproc-per-node VALUE"),
        ("torchrun --nproc-per-node 2", "muster run torchrun train.py"),
        ("python -m torch.distributed.launch train.py", "--use-env"),
        ("python -c print()", "train.py"),
        ("python -X dev train.py", "--env PYTHON"),
        ("/nowhere/python train.py", "/nowhere/python -m torchmuster run"),
        ("accelerate launch train.py", "muster run --ranks 2 train.py"),
        ("srun torchrun train.py", "without srun: muster run"),
        ("uv run torchrun train.py", "uv run muster run"),
        ("deepspeed --num_gpus 2 train.py", "muster run --num-gpus 2"),
        ("bash train.sh", "muster run"),
        ("train.py --dry-run", "muster run --dry-run train.py"),
        ("--ranks 2 -m package.train --dry-run", "muster run --ranks 2 --dry-run -m package.train"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_says_what_to_type(
    translated: Translate, line: str, fix: str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as caught:
        translated(line)
    assert fix in caught.value.fix
    assert str(caught.value).replace(sys.executable, "PYTHON") == snapshot


@pytest.mark.parametrize("script", ["train.py", "torchrun", "python"])
def test_a_file_of_this_name_is_the_script(
    translated: Translate, folder: Path, script: str
) -> None:
    (folder / script).touch()
    assert translated(f"-- {script} --nproc-per-node 2") == f"run | {script} --nproc-per-node 2"
    assert translated(f"{script} x") == f"run | {script} x"


def test_a_program_that_is_python_code_needs_no_python(translated: Translate, folder: Path) -> None:
    program = folder / "tune"
    program.write_text("#!/opt/venv/bin/python\n")
    expected = f"run --ranks 2 | {program} x"
    assert translated("torchrun --nproc-per-node 2 --no-python ./tune x") == expected


def test_flags_of_muster_after_the_script_are_the_script_s(
    translated: Translate, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translated("train.py --detach") == "run | train.py --detach"
    assert "--detach is passed to train.py" in capsys.readouterr().err
    assert translated("train.py --help --json") == "run | train.py --help --json"
    assert "--help --json are passed to train.py" in capsys.readouterr().err
    # The spelling that passes it on, and a script that has such a flag.
    assert translated("train.py -- --dry-run") == "run | train.py --dry-run"
    assert translated("-- train.py --dry-run") == "run | train.py --dry-run"
    assert translated("train.py x -- y --dry-run") == "run | train.py x -- y --dry-run"
    (folder / "train.py").write_text(
        "argparse: parser.add_argument('--dry-run')  # --json --max_restarts"
    )
    for line in ("train.py --dry-run", "train.py --json --help", "train.py --max-restarts=3"):
        assert translated(line) == f"run | {line}"
    assert capsys.readouterr().err == ""


def test_secrets_are_not_shown(translated: Translate, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "a" * 30
    assert secret in translated(f"HF_TOKEN={secret} torchrun train.py --api-key {secret}")
    said = capsys.readouterr().err
    assert "HF_TOKEN" in said
    assert secret not in said


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "--nproc-per-nod", "2", "train.py"], "did you mean --nproc-per-node?"),
        (["run", "--rank", "2", "train.py"], "did you mean --ranks?"),
        (["watch", "--onc"], "did you mean --once?"),
        (["train", "--resum", "last"], "did you mean --resume?"),
        (["train", "--zzz"], "unrecognized arguments: --zzz"),
    ],
)  # fmt: skip
def test_an_unknown_flag_gets_a_hint(muster: Muster, words: list[str], hint: str) -> None:
    done = muster(*words)
    assert done.code == 2
    assert hint in done.err.splitlines()[-1]


def test_several_hosts_need_names(
    muster: Muster, folder: Path, snapshot: SnapshotAssertion
) -> None:
    done = muster("run", "torchrun", "--nnodes", "2", "--nproc-per-node", "4", "train.py")
    assert done.code == 2
    assert "--hosts a,b" in done.err
    assert "muster run --join --nodes 2" in done.err
    assert not (folder / "runs").exists()
    assert done.err == snapshot


def test_the_table_knows_the_variables() -> None:
    assert torchrun_flags.TORCHRUN_FLAGS[0].variable == "PET_NPROC_PER_NODE"
