"""What a host can and cannot have run on a machine that joined it without ``--trust-host``."""

import json
import sys
import typing
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect
from syrupy.assertion import SnapshotAssertion

import torchmuster
from torchmuster.cli.job_flags import _LIBRARY_VARIABLES
from torchmuster.config import fields
from torchmuster.config.layers import OTHER_VARIABLES, variable_name
from torchmuster.config.training import FUNCTIONS
from torchmuster.diagnose.probe_client import HOST_PROBE as EXAMINER
from torchmuster.diagnose.probing import PROGRAM as COLLECTIVES
from torchmuster.errors import NotTrusted
from torchmuster.launch import protocol
from torchmuster.launch.launcher.node_handle import error_from
from torchmuster.launch.node import join_policy
from torchmuster.launch.node.join_policy import check_join_policy
from torchmuster.launch.node.process_cleanup import GRACE_VARIABLE

START = protocol.Start(
    attempt=0,
    node_rank=1,
    nodes=2,
    first_rank=1,
    world_size=2,
    backend="muster",
    endpoint="10.0.0.1:29400",
    address="10.0.0.1",
    port=29400,
    local_address="10.0.0.2",
    interface="eth0",
    timeout_s=60.0,
    max_restarts=0,
)


def prepare(*command: str, module: bool = False, **changes: object) -> protocol.Prepare:
    """Return what a host sends to have a command run."""
    message = protocol.Prepare(
        run_id="20260131-120000-train-1a2b",
        token="0123.1.0.ranks",
        command=command,
        module=module,
        folder="/home/ana/project",
        device="auto",
        ranks=None,
    )
    return msgspec.structs.replace(message, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project as people have it: scripts, packages, a virtual environment, data, and links."""
    project = tmp_path / "project"
    outside = tmp_path / "outside"
    for name in (
        *("project/train.py", "project/sub/eval.py", "project/single.py", "project/config.yaml"),
        *("project/pkg/__init__.py", "project/pkg/train.py", "project/tool/__main__.py"),
        *("project/spread/part.py", "project/json/tool.py", "project/psutil/tests.py"),
        *("project/torchmuster/launch.py", "project/data/a.jsonl", "project/model/config.json"),
        *("project/.hidden/x.py", "project/venv/bin/x.py", "project/venv/pyvenv.cfg"),
        *("project/venv/lib/python3.12/site-packages/pip/__main__.py",),
        *("project/python/lib/python3.12/timeit.py", "project/python/lib/python3.12/os.py"),
        *("outside/x.py", "outside/pkg2/__init__.py", "outside/pkg2/a.py", "outside/a.jsonl"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (project / "link.py").symlink_to(outside / "x.py")
    (project / "linked").symlink_to(outside)
    (project / "pkg2").symlink_to(outside / "pkg2")
    (project / "inner.py").symlink_to("sub/eval.py")
    (project / "loop.py").symlink_to("loop.py")
    return project


GOOD_SCRIPTS = ("train.py", "./train.py", "sub/eval.py", "sub/../train.py", "inner.py")
BAD_SCRIPTS = (
    *("../outside/x.py", "sub/../../outside/x.py", "link.py", "linked/x.py", "loop.py"),
    *(
        "/etc/passwd",
        "/dev/stdin",
        "/proc/self/fd/0",
        "/dev/fd/3",
        "",
        ".",
        "..",
        "sub",
        "missing.py",
    ),
    *(".hidden/x.py", "venv/bin/x.py", "venv/lib/python3.12/site-packages/pip/__main__.py"),
    *(
        "python/lib/python3.12/timeit.py",
        "python/lib/python3.12/os.py",
        "-c",
        "--help",
        "a\0b",
        "~/x.py",
    ),
    *(json.__file__, pytest.__file__, torchmuster.__file__, sys.executable),
)


@pytest.mark.parametrize("script", GOOD_SCRIPTS)
def test_scripts_inside_the_folder_run(folder: Path, script: str) -> None:
    message = prepare(script, "--lr", "1e-4", "../anything", "-c")
    assert check_join_policy(message, folder) == msgspec.structs.replace(
        message, folder=str(folder)
    )


@pytest.mark.parametrize("script", BAD_SCRIPTS)
def test_other_scripts_are_refused(folder: Path, script: str) -> None:
    with pytest.raises(NotTrusted):
        check_join_policy(prepare(script), folder)


def test_absolute_path_into_the_folder_runs(folder: Path) -> None:
    check_join_policy(prepare(str(folder / "train.py")), folder)


def test_folder_that_is_itself_a_link_is_no_way_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(folder)
    check_join_policy(prepare("train.py"), tmp_path / "here")
    with pytest.raises(NotTrusted):
        check_join_policy(prepare("link.py"), tmp_path / "here")


def test_code_of_torchmuster_in_the_folder_is_not_the_folder_s_own() -> None:
    package = Path(torchmuster.__file__).parent
    for folder in (package, package.parent, package.parent.parent):
        with pytest.raises(NotTrusted):
            check_join_policy(prepare(str(package / "cli" / "main.py")), folder)
        with pytest.raises(NotTrusted):
            check_join_policy(prepare("torchmuster.launch.node", module=True), folder)


@pytest.mark.parametrize(
    "module", ["single", "train", "pkg.train", "tool", "sub.eval", "spread.part"]
)
def test_modules_inside_the_folder_run(folder: Path, module: str) -> None:
    check_join_policy(prepare(module, "--lr", "1", module=True), folder)


@pytest.mark.parametrize(
    "module",
    [
        *(
            "timeit",
            "json.tool",
            "json",
            "http.server",
            "pdb",
            "this",
            "sys",
            "_frozen_importlib",
            "__hello__",
            "__phello__.spam",
            "xxsubtype",
        ),
        *("psutil", "psutil.tests", "msgspec", "pytest", "pip", "torch.distributed.run"),
        *("linked.x", "link", "pkg2.a", "venv.bin.x", "python.lib.timeit", "pkg", "pkg.missing"),
        *(
            "missing",
            "",
            ".",
            "..train",
            "pkg..train",
            "pkg/train",
            "../outside/x",
            "-c",
            "a b",
            "__main__",
        ),
        *(
            "torchmuster",
            "torchmuster.launch",
            "torchmuster.launch.node",
            "torchmuster.launch.node.elastic_agent",
        ),
        *(
            "torchmuster.launch.node.reaper",
            "torchmuster.notebook.rank_loop",
            "torchmuster.cli",
        ),
        *(
            "torchmuster.notebook.launcher_process",
            "torchmuster.diagnose.host_probe",
            "loop",
            "x\0y",
        ),
    ],
)
def test_other_modules_are_refused(folder: Path, module: str) -> None:
    with pytest.raises(NotTrusted):
        check_join_policy(prepare(module, module=True), folder)


def test_module_of_an_environment_inside_the_folder_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder / "venv/lib/python3.12/site-packages")
    with pytest.raises(NotTrusted):
        check_join_policy(prepare("pip", module=True), folder)


def test_module_installed_from_the_folder_itself_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "src" / "own").mkdir(parents=True)
    (folder / "src" / "own" / "train.py").touch()
    with pytest.raises(NotTrusted):
        check_join_policy(prepare("own.train", module=True), folder)
    monkeypatch.syspath_prepend(folder / "src")  # as pip install -e does
    check_join_policy(prepare("own.train", module=True), folder)


def test_folder_without_init_does_not_stand_in_for_an_installed_package(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_join_policy(prepare("spread.part", module=True), folder)
    (tmp_path / "installed" / "spread").mkdir(parents=True)
    (tmp_path / "installed" / "spread" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    with pytest.raises(NotTrusted):
        check_join_policy(prepare("spread.part", module=True), folder)


def test_nothing_is_imported_to_find_a_module(folder: Path) -> None:
    (folder / "pkg" / "__init__.py").write_text("raise AssertionError\n")
    check_join_policy(prepare("pkg.train", module=True), folder)
    assert "pkg" not in sys.modules


@pytest.mark.parametrize("program", [COLLECTIVES, "torchmuster.launch.probes.smoke"])
def test_probes_of_torchmuster_run_without_arguments(folder: Path, program: str) -> None:
    check_join_policy(prepare(program, module=True), folder)
    with pytest.raises(NotTrusted):
        check_join_policy(prepare(program, "--x", module=True), folder)


def test_no_command_at_all_is_refused(folder: Path) -> None:
    for module in (False, True):
        with pytest.raises(NotTrusted):
            check_join_policy(prepare(module=module), folder)


# ---- paths and variables


def test_machine_keeps_its_own_folder_and_log_path(folder: Path) -> None:
    message = prepare("train.py", folder="/etc", logs="/home/bo/.ssh", run="/home/bo/other-run")
    given = check_join_policy(message, folder)
    assert isinstance(given, protocol.Prepare)
    assert (given.folder, given.logs, given.run) == (str(folder), None, None)


def test_run_folder_is_used_where_it_is_inside_the_folder(folder: Path) -> None:
    inside = str(folder / "runs" / "20260131-train")
    given = check_join_policy(prepare("train.py", run=inside), folder)
    assert isinstance(given, protocol.Prepare)
    assert given.run == inside
    given = check_join_policy(prepare("train.py", run=str(folder / "linked" / "run")), folder)
    assert isinstance(given, protocol.Prepare)
    assert given.run is None


HARMFUL = (
    *(
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "PYTHONHOME",
        "PYTHONINSPECT",
        "PYTHONBREAKPOINT",
        "PYTHONUSERBASE",
    ),
    *("PYTHONPYCACHEPREFIX", "PYTHONPLATLIBDIR", "PYTHONEXECUTABLE", "PYTHONWARNINGS"),
    *(
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LD_AUDIT",
        "DYLD_INSERT_LIBRARIES",
        "GCONV_PATH",
        "PATH",
        "HOME",
    ),
    *("BASH_ENV", "ENV", "IFS", "SHELL", "TMPDIR", "EDITOR", "PAGER", "CC", "CXX", "CUDA_HOME"),
    *(
        "TORCH_EXTENSIONS_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TORCH_LOGS_OUT",
        "TORCH_HOME",
    ),
    *(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
    ),
    *("TORCH_FR_DUMP_TEMP_FILE", "TORCHELASTIC_ERROR_FILE", "PET_LOG_DIR", "PET_NPROC_PER_NODE"),
    *(
        "NCCL_NET_PLUGIN",
        "NCCL_TUNER_PLUGIN",
        "NCCL_PROFILER_PLUGIN",
        "NCCL_ENV_PLUGIN",
        "NCCL_CONF_FILE",
    ),
    *(
        "NCCL_TOPO_FILE",
        "NCCL_TOPO_DUMP_FILE",
        "NCCL_GRAPH_FILE",
        "NCCL_GRAPH_DUMP_FILE",
        "NCCL_DEBUG_FILE",
    ),
    *(
        "NCCL_RAS_ADDR",
        "NCCL_COMM_ID",
        "NCCL_GIN_PLUGIN",
        "NCCL_CUDA_PATH",
        "nccl_debug",
        "NCCL_",
        "",
    ),
    *("GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    *("HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "MLFLOW_TRACKING_URI", "WANDB_BASE_URL", "https_proxy"),
    *("CUDA_INJECTION64_PATH", "NVBLAS_CONFIG_FILE", "OMP_TOOL_LIBRARIES", "KMP_AFFINITY"),
    *sorted(OTHER_VARIABLES),
    *map(variable_name, fields.leaves()),
)


@pytest.mark.parametrize("name", HARMFUL)
def test_variables_that_are_not_on_the_list_are_refused_by_name(folder: Path, name: str) -> None:
    message = prepare("train.py", environment={"OMP_NUM_THREADS": "2", name: "/tmp/x"})
    with pytest.raises(NotTrusted) as caught:
        check_join_policy(message, folder)
    assert name in caught.value.what
    assert "OMP_NUM_THREADS" not in caught.value.what
    assert "--trust-host" in caught.value.fix


def test_every_listed_variable_is_taken(folder: Path) -> None:
    message = prepare("train.py", environment=dict.fromkeys(join_policy.VARIABLES, "1"))
    given = check_join_policy(message, folder)
    assert isinstance(given, protocol.Prepare)
    assert given.environment == message.environment


def test_no_listed_variable_names_a_file_a_library_or_an_address() -> None:
    words = {
        "FILE",
        "PATH",
        "DIR",
        "PLUGIN",
        "CONF",
        "HOME",
        "PRELOAD",
        "ADDR",
        "PIPE",
        "OUT",
        "CMD",
    }
    allocator = {f"PYTORCH_{kind}ALLOC_CONF" for kind in ("", "CUDA_", "HIP_")}
    assert not [
        name
        for name in join_policy.VARIABLES - allocator
        if words & set(name.split("_"))
        # An address family and a range of addresses choose among the machine's own.
        and name not in {"NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE"}
    ]


def test_what_torchmuster_itself_sends_is_on_the_list() -> None:
    assert GRACE_VARIABLE in join_policy.VARIABLES
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_P2P_DISABLE"):
        assert name in join_policy.VARIABLES
    # Of what a host takes over from its own shell, each prefix has something that is allowed.
    for prefix in _LIBRARY_VARIABLES:
        assert any(name.startswith(prefix) for name in join_policy.VARIABLES), prefix


# ---- other messages


@pytest.mark.parametrize("backend", ["c10d", "etcd-v2", "static", "", "muster "])
def test_rendezvous_that_unpickles_is_refused(folder: Path, backend: str) -> None:
    assert check_join_policy(START, folder) == START
    with pytest.raises(NotTrusted):
        check_join_policy(msgspec.structs.replace(START, backend=backend), folder)


@pytest.mark.parametrize(
    "program",
    [
        *("torchmuster.launch.node", "torchmuster.launch.node.reaper", "timeit", "os", ""),
        *("torchmuster.notebook.launcher_process", "torchmuster.worker", "torchmuster.cli"),
    ],
)
def test_only_the_examiner_runs_beside_the_node_agent(folder: Path, program: str) -> None:
    assert check_join_policy(protocol.StartSidecar(program=EXAMINER, token="0"), folder)
    with pytest.raises(NotTrusted):
        check_join_policy(protocol.StartSidecar(program=program, token="0"), folder)


def test_examiner_looks_at_its_own_folder(folder: Path) -> None:
    question = {"id": 1, "verb": "examine", "argument": {"folder": "/etc", "at_most": "INSTANT"}}
    given = check_join_policy(protocol.Relay(text=json.dumps(question)), folder)
    assert isinstance(given, protocol.Relay)
    assert json.loads(given.text) == {**question, "argument": {"at_most": "INSTANT"}}


@pytest.mark.parametrize("text", ["", "[]", "x", '{"id":', "[" * 100_000, '{"x":' * 100_000])
def test_what_is_no_question_does_not_reach_the_examiner(folder: Path, text: str) -> None:
    with pytest.raises(NotTrusted):
        check_join_policy(protocol.Relay(text=text), folder)


def test_every_kind_of_message_was_thought_of(folder: Path) -> None:
    """A new kind is refused until somebody decides about it, and must then be added here."""
    harmless: list[protocol.ToAgent] = [
        protocol.Listen(nonce="n", port=None),
        protocol.Reach(nonce="n", targets=(), timeout_s=1.0),
        protocol.Stop(grace_s=5.0, why=""),
        protocol.Signal(name="SIGUSR1"),
        protocol.DumpStacks(ranks=(0,)),
        protocol.ListPackages(),
        protocol.SendLog(rank=1, most_bytes=1),
        protocol.Alive(),
        protocol.Leave(exit_code=0, words=""),
    ]
    for message in harmless:
        assert check_join_policy(message, folder) == message
    looked_at = {
        protocol.Prepare,
        protocol.Start,
        protocol.StartSidecar,
        protocol.Relay,
        *map(type, harmless),
    }
    assert set(typing.get_args(typing.get_args(protocol.ToAgent)[0])) == looked_at
    with pytest.raises(NotTrusted):
        check_join_policy(protocol.Started(attempt=0, pid=1), folder)  # type: ignore[arg-type]


# ---- the worker of muster train


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--config", "config.yaml"),
        ("--config=config.yaml", "--device", "cpu"),
        ("--run-folder", "runs/20260131-train"),
        ("--set", "train.steps=10", "--set", "train.learning_rate=1e-3"),
        ("--set", "model.build=pkg.train:make", "--set", "data.dataset=single:data.make"),
        ("--set", "model.loss=cross_entropy", "--set", "data.tokenizer=bytes"),
        ("--set", "model.model_name_or_path=model", "--set", "data.files=data/*.jsonl"),
        ("--set", "checkpoint.folder=saved", "--set", "checkpoint.every=10min"),
        ("--set", "metrics.sinks=[tensorboard]", "--set", "experiment_name=../x"),
        ("--set", "model.build=null"),
    ],
)
def test_worker_runs_on_code_and_files_of_the_folder(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    check_join_policy(prepare("torchmuster.worker", *arguments, module=True), folder)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config", "../outside/config.yaml"),
        ("--config", "/etc/passwd"),
        ("--config", "linked/x.yaml"),
        ("--run-folder", "/home/bo"),
        ("--run-folder", ".git/hooks"),
        ("--run-folder=..",),
        ("--set", "model.build=os:abort"),
        ("--set", "model.build=torch.hub:load"),
        ("--set", "model.loss=subprocess:Popen"),
        ("--set", "data.dataset=pkg2.a:make"),
        ("--set", "data.evaluation_dataset=antigravity:geohash"),
        ("--set", "model.build=torchmuster.launch.node.__main__:main"),
        ("--set", "model.model_name_or_path=gpt2"),
        ("--set", "model.model_name_or_path=/models/x"),
        ("--set", "model.model_name_or_path=~/model"),
        ("--set", "data.files=/etc/*"),
        ("--set", "data.files=s3://bucket/x"),
        ("--set", "data.files=*/../a.jsonl"),
        ("--set", "data.evaluation_files=linked/a.jsonl"),
        ("--set", "data.hugging_face=some/dataset"),
        ("--set", "data.tokenizer=some/tokenizer"),
        ("--set", "checkpoint.folder=/home/bo"),
        ("--set", "checkpoint.folder=s3://bucket/x"),
        ("--set", "metrics.mlflow_uri=http://10.0.0.1"),
        ("--set", "train.steps=many"),
        ("--set", "no.such=1"),
        ("--conf", "config.yaml"),
        ("--help",),
        ("train.py",),
    ],
    ids=" ".join,
)
def test_worker_with_code_or_files_from_elsewhere_is_refused(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(NotTrusted):
        check_join_policy(prepare("torchmuster.worker", *arguments, module=True), folder)


def test_every_setting_that_is_a_text_was_thought_of() -> None:
    """A new setting that is a text names code, a place or an address, or is added here as harmless."""
    harmless = {
        *("data.split", "data.text_field", "model.lora_targets", "experiment_name"),
        *("data.config_name", "data.revision", "data.evaluation_split", "data.messages_field"),
        *("data.prompt_field", "data.completion_field", "model.lora_modules_to_save"),
        "checkpoint.best_metric",
        *("metrics.mlflow_experiment", "metrics.wandb_project", "checkpoint.every"),
        # the launcher's alone
        *("launch.hosts", "launch.remote_python", "launch.borrow_every", "distributed.gpu_ids"),
    }
    checked = {*FUNCTIONS, *join_policy.PLACES, *join_policy.ADDRESSES}
    assert {path for path, leaf in fields.leaves().items() if takes_text(leaf.type)} == {
        *harmless,
        *checked,
    }


def takes_text(hint: object) -> bool:
    kind = inspect.type_info(hint)

    def within(one: inspect.Type) -> bool:
        match one:
            case inspect.Metadata(type=inner) | inspect.VarTupleType(item_type=inner):
                return within(inner)
            case inspect.UnionType(types=types):
                return any(map(within, types))
        return isinstance(one, inspect.StrType)

    return within(kind)


# ---- what people read


def test_refusals_name_what_is_refused_why_and_the_way_out(
    folder: Path, snapshot: SnapshotAssertion
) -> None:
    messages: list[protocol.ToAgent] = [
        prepare("timeit", module=True),
        prepare("../outside/x.py"),
        prepare("train.py", environment={"LD_PRELOAD": "x.so", "PYTHONPATH": "y"}),
        prepare("torchmuster.worker", "--set", "model.build=os:abort", module=True),
        prepare("torchmuster.worker", "--help", module=True),
        msgspec.structs.replace(START, backend="c10d"),
        protocol.StartSidecar(program="torchmuster.launch.node", token="0"),
        protocol.Relay(text="["),
    ]
    refusals = []
    for message in messages:
        with pytest.raises(NotTrusted) as caught:
            check_join_policy(message, folder)
        refusals.append(str(caught.value).replace(str(folder), "FOLDER"))
    assert "\n\n".join(refusals) == snapshot


def test_refusal_arrives_at_the_host_as_what_it_was() -> None:
    trouble = protocol.Trouble(name="not-trusted", what="refused", fix="do", exit_code=2)
    error = error_from(trouble, "node2")
    assert isinstance(error, NotTrusted)
    assert (error.name, error.what, int(error.exit_code)) == ("not-trusted", "node2: refused", 2)
