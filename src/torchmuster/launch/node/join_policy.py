"""What a node that joined with a code does for its host, and what it refuses.

The host chooses what runs, so a node that does not trust it (``muster join`` without ``--trust-host``) checks
each message before it acts: ``allowed`` returns what to do, or raises ``NotTrusted``. It starts only scripts
and modules of the folder it was started in and a few programs of torchmuster, accepts only variables that can
neither load code nor name a file, and keeps its own folder and log path. docs/security.md lists what this does not
protect against. Connections by ssh, srun and pipes are not checked: their users already have the account.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NoReturn

import msgspec

import torchmuster
from torchmuster.config import written
from torchmuster.config.layers import Strength
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.training import FUNCTIONS, OWN_NAMES
from torchmuster.errors import ConfigError, NotTrusted
from torchmuster.launch import protocol
from torchmuster.redaction import printable

WORKER = "torchmuster.worker"
# Modules of torchmuster that ranks may run, without arguments.
PROBES = frozenset({"torchmuster.launch.probes.smoke", "torchmuster.diagnose.probes.collectives"})
# Programs that may run alongside the node agent.
SIDECARS = frozenset({"torchmuster.diagnose.host_probe"})
# The other backends unpickle data from a store that the host may have written to.
RENDEZVOUS = "muster"

# By name, not by prefix: NCCL_NET_PLUGIN and NCCL_TUNER_PLUGIN load libraries, NCCL_DEBUG_FILE,
# NCCL_TOPO_DUMP_FILE and TORCH_FR_DUMP_TEMP_FILE name files to be written, NCCL_RAS_ADDR opens a
# port, and a TORCHMUSTER_… variable is a setting, which may name code.
VARIABLES = frozenset(
    """
    CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
    CUDA_VISIBLE_DEVICES FI_EFA_FORK_SAFE FI_EFA_USE_DEVICE_RDMA FI_PROVIDER GLOO_SOCKET_IFNAME
    HF_HUB_OFFLINE HSA_FORCE_FINE_GRAIN_PCIE MKL_NUM_THREADS OMP_NUM_THREADS PYTHONHASHSEED
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF RCCL_MSCCL_ENABLE
    RCCL_MSCCLPP_ENABLE TOKENIZERS_PARALLELISM UCX_IB_GID_INDEX UCX_NET_DEVICES UCX_TLS
    NCCL_ALGO NCCL_BUFFSIZE NCCL_CHECKS_DISABLE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CTA_POLICY
    NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE
    NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ADDR_FAMILY
    NCCL_IB_ADDR_RANGE NCCL_IB_AR_THRESHOLD NCCL_IB_CUDA_SUPPORT NCCL_IB_DISABLE NCCL_IB_GID_INDEX
    NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_QPS_PER_CONNECTION
    NCCL_IB_RETRY_CNT NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC
    NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY NCCL_LAUNCH_MODE NCCL_LOCAL_REGISTER NCCL_MAX_CTAS
    NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MNNVL_ENABLE NCCL_MULTI_RANK_GPU_ENABLE
    NCCL_NCHANNELS_PER_NET_PEER NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE
    NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_P2P_PXN_LEVEL NCCL_PROTO
    NCCL_PXN_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
    TORCH_CPP_LOG_LEVEL TORCH_DISTRIBUTED_DEBUG TORCH_ELASTIC_SHUTDOWN_TIMEOUT
    TORCH_FR_BUFFER_SIZE TORCH_FR_CPP_STACK
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT
    TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
    TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_NAN_CHECK TORCH_NCCL_PROPAGATE_ERROR
    TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_SHOW_CPP_STACKTRACES
    """.split()  # noqa: SIM905  # readable as a list of names
)

# Settings of the worker that name files; those of ``FUNCTIONS`` name code.
PLACES = frozenset(
    {
        *("model.model_name_or_path", "data.files", "data.hugging_face", "data.tokenizer"),
        *("data.evaluation_files", "data.images", "data.evaluation_images"),
        *("data.chat_template", "checkpoint.folder"),
    }
)
# For these, a value that is not a local file would be downloaded from the Hugging Face hub.
_FETCHED = frozenset({"model.model_name_or_path", "data.hugging_face", "data.tokenizer"})
ADDRESSES = frozenset({"metrics.mlflow_uri"})

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# A folder that has one of these is a Python installation: its files were not put there to be run.
_INSTALLATION = ("pyvenv.cfg", "conda-meta", "site-packages", "dist-packages", "os.py")
_TRUST = "or join with: muster join --trust-host CODE"


def check_join_policy(message: protocol.ToAgent, folder: Path) -> protocol.ToAgent:
    """Return the part of a host's message that a node that joined from a folder executes.

    Raises ``NotTrusted`` for messages that it refuses or cannot check.
    """
    try:
        return _allowed(message, folder)
    except NotTrusted:
        raise
    except Exception as error:
        raise NotTrusted(
            f"refused a {type(message).__name__} message that cannot be checked",
            why=f"{type(error).__name__}: {error}",
        ) from error


def _allowed(message: protocol.ToAgent, folder: Path) -> protocol.ToAgent:
    match message:
        case protocol.Prepare():
            _check_command(message.command, message.module, folder)
            _check_variables(message.environment)
            seen = message.run is not None and _is_own(Path(message.run), folder)
            return msgspec.structs.replace(
                message, folder=str(folder), logs=None, run=message.run if seen else None
            )
        case protocol.Start(backend=backend) if backend != RENDEZVOUS:
            raise NotTrusted(
                f"refused rendezvous backend {backend!r}",
                why="torch unpickles data from this backend's store, which can run any code",
                fix=f"omit --rdzv-backend, {_TRUST}",
            )
        case protocol.StartSidecar(program=program) if program not in SIDECARS:
            raise NotTrusted(
                f"refused sidecar program {program!r}",
                why=f"a joined node starts only {', '.join(sorted(SIDECARS))}",
            )
        case protocol.Relay():
            return protocol.Relay(text=_in_own_folder(message.text))
        case (
            protocol.Start()
            | protocol.StartSidecar()
            | protocol.Listen()
            | protocol.Reach()
            | protocol.Stop()
            | protocol.Signal()
            | protocol.DumpStacks()
            | protocol.SendLog()
            | protocol.ListPackages()
            | protocol.Alive()
            | protocol.Leave()
        ):
            return message
    raise NotTrusted(
        f"refused a {type(message).__name__} message",
        why="it is not on the list of allowed messages",
    )


def _in_own_folder(question: str) -> str:
    """Return a request for the host probe without its folder: the probe uses its own."""
    asked = msgspec.json.decode(question, type=dict)
    if isinstance(asked.get("argument"), dict):
        asked["argument"].pop("folder", None)
    return msgspec.json.encode(asked).decode()


# ---- commands


def _check_command(command: Sequence[str], module: bool, folder: Path) -> None:
    first, arguments = command[0], command[1:]
    if module and first in PROBES and not arguments:
        return
    if module and first == WORKER:
        _check_worker(arguments, folder)
    elif module and not _is_own_module(first, folder, runnable=True):
        raise _not_own(f"module {printable([first])!r}", folder)
    elif not module and not (_is_own(Path(first), folder) and (folder / first).is_file()):
        raise _not_own(f"script {printable([first])!r}", folder)


def _not_own(what: str, folder: Path) -> NotTrusted:
    return NotTrusted(
        f"refused {what}: not part of {folder}",
        why="a joined node runs only code, and accepts only paths, inside the folder in which muster join was "
        "started; hidden files, installed files and links that lead out of it are refused",
        fix=f"copy it into that folder, {_TRUST}",
    )


def _is_own(path: Path, folder: Path) -> bool:
    """Return whether a path is inside a folder and neither hidden nor installed."""
    root, real = folder.resolve(), (folder / path).resolve()
    if not real.is_relative_to(root) or real.is_relative_to(Path(torchmuster.__file__).parent):
        return False
    below = root
    for part in real.relative_to(root).parts:
        below /= part
        if part.startswith(".") or part in _INSTALLATION:
            return False
        if any((below / mark).exists() for mark in _INSTALLATION):
            return False
    return real != root


def _is_own_module(name: str, folder: Path, *, runnable: bool) -> bool:
    """Return whether Python, started in a folder, finds a module there and nowhere else.

    Nothing is imported. A name that is also installed is refused: Python may have imported that package
    before, and prefers it to a folder without ``__init__.py``.
    """
    top, *rest = name.split(".")
    if not _MODULE.fullmatch(name) or top in sys.stdlib_module_names:
        return False
    starts = [PathFinder.find_spec(top, [str(folder)]), importlib.util.find_spec(top)]
    chains = [_chain(start, rest, runnable) for start in starts if start is not None]
    whole = [chain for chain in chains if chain[-1] is not None]
    return bool(whole) and all(_spec_is_own(one, folder) for chain in chains for one in chain)


def _chain(start: ModuleSpec, rest: Sequence[str], runnable: bool) -> list[ModuleSpec | None]:
    """Return the specs that Python would find on the path to a module; None at the end if it is missing."""
    chain: list[ModuleSpec | None] = [start]
    spec: ModuleSpec | None = start
    for part in rest:
        spec = _inside_package(spec, part)
        chain.append(spec)
        if spec is None:
            return chain
    if runnable and spec is not None and spec.submodule_search_locations is not None:
        chain.append(_inside_package(spec, "__main__"))
    return chain


def _inside_package(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if package is None or package.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(f"{package.name}.{name}", list(package.submodule_search_locations))


def _spec_is_own(spec: ModuleSpec | None, folder: Path) -> bool:
    if spec is None:
        return True
    if spec.origin is not None and not spec.has_location:  # built into Python
        return False
    places = [*filter(None, [spec.origin]), *(spec.submodule_search_locations or ())]
    return all(_is_own(Path(place), folder) for place in places)


# ---- variables and arguments


def _check_variables(environment: dict[str, str]) -> None:
    refused = sorted(set(environment) - VARIABLES)
    if refused:
        names = printable([", ".join(refused)])
        raise NotTrusted(
            f"refused {'variable' if len(refused) == 1 else 'variables'} {names}",
            why="a joined node accepts only variables that can neither load code nor name a file; "
            "docs/dev/wire-protocol.md lists them",
            fix=f"start the host without {names}, {_TRUST}",
        )


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NotTrusted(f"refused arguments of {WORKER}: {message}", fix=f"omit them, {_TRUST}")


def _check_worker(arguments: Sequence[str], folder: Path) -> None:
    """Check the host's arguments for the worker; the node's own settings file is not checked."""
    parser = _Arguments(add_help=False, allow_abbrev=False)
    written.add_arguments(parser)
    options = parser.parse_args(list(arguments))
    for flag, path in (("--config", options.config), ("--run-folder", options.run_folder)):
        if path is not None and not _is_own(path, folder):
            raise _not_own(f"{flag} {printable([str(path)])}", folder)
    try:
        given = resolve_settings(flags=options.set)
    except ConfigError as error:
        raise NotTrusted(f"refused arguments of {WORKER}", why=error.why) from error
    for path, value in given.values().items():
        if given.sources[path].strength is Strength.FLAG and not _fits(path, value, folder):
            raise _not_own(f"{path}={printable([str(value)])}", folder)


def _fits(path: str, value: object, folder: Path) -> bool:
    """Return whether a host may set a setting to this value."""
    if value is None:
        return True
    if path in FUNCTIONS:
        module, _, _ = str(value).partition(":")
        known = value in OWN_NAMES.get(path, ())
        return known or _is_own_module(module, folder, runnable=False)
    if path in PLACES:
        place = Path(str(value)).expanduser()
        if path == "data.tokenizer" and value == "bytes":
            return True
        if "://" in str(value) or ".." in place.parts:  # a link and .. lead elsewhere in a pattern
            return False
        is_here = path not in _FETCHED or (folder / place).exists()
        return is_here and _is_own(place, folder)
    return path not in ADDRESSES
