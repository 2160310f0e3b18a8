"""NCCL errors, and how torch reports them."""

from torchmuster.known_errors.rule import Role, Rule

_SAY_MORE = "NCCL_DEBUG=WARN muster run train.py   # NCCL then names the cause in this rank's log"
_LOCAL_GPU = 'let each rank use its own GPU: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
_NETWORK_SAYS = (
    r"Connection (?:reset|closed|refused|timed out)",
    r"Broken pipe",
    r"ncclRemoteError",
    r"remote process exited",
    r"No route to host|Network is unreachable",
    r"no socket interface found",
)
_ELSE_SAYS = (
    *_NETWORK_SAYS,
    r"shared memory segment|/dev/shm|posix_fallocate",
    r"ibv_\w+",
    r"Too many open files",
    r"Duplicate GPU detected",
    r"Mismatched NCCL version",
)
_CUDA_SAYS = (
    r"out of memory",
    r"peer access|peer mapping",
    r"invalid device ordinal",
    r"no kernel image",
    r"illegal memory access",
    r"unspecified launch failure",
    r"driver version is insufficient",
    r"uncorrectable ECC",
    r"busy or unavailable",
    r"device-side assert",
)

RULES = (
    Rule(
        name="nccl-no-interface",
        patterns=(
            r"Bootstrap ?: no socket interface found",
            r"no socket interface found",
            r"NET/Socket ?: no (?:usable )?interface",
            r"Bootstrap ?: [^\n]{0,20}no [^\n]{0,20}interface",
            r"NET/Socket ?: No interface",
        ),
        what="NCCL finds no usable network interface on {host}",
        why="NCCL_SOCKET_IFNAME names an interface that does not exist or has no address",
        confirm="ip -brief address; env | grep NCCL_SOCKET_IFNAME",
        fix="unset NCCL_SOCKET_IFNAME\nor name one that every host has:\nexport NCCL_SOCKET_IFNAME=eth0",
    ),
    Rule(
        name="duplicate-gpu",
        patterns=(r"Duplicate GPU detected", r"Multiple Ranks are using the same GPU"),
        what="two ranks use the same GPU, which NCCL does not support",
        why="every rank uses GPU 0 by default, and NCCL needs one GPU per rank; to NCCL, the MIG slices of a GPU "
        "are one GPU",
        confirm="nvidia-smi   # one process of the run per GPU?\nmuster gpus",
        fix=f"{_LOCAL_GPU}\nstart no more ranks than GPUs:\ntorchrun --nproc-per-node gpu …\n"
        "for MIG slices, with NCCL 2.30 or newer:\nexport NCCL_MULTI_RANK_GPU_ENABLE=1",
    ),
    Rule(
        name="nccl-without-gpu",
        patterns=(
            r"ProcessGroupNCCL is only supported with GPUs",
            r"NCCL backend[^\n]{0,40}(?:requires|needs)[^\n]{0,20}GPU",
        ),
        what='the script requests the backend "nccl", which needs NVIDIA GPUs, and this rank sees none',
        confirm='nvidia-smi -L; echo "$CUDA_VISIBLE_DEVICES"\n'
        'python -c "import torch; print(torch.cuda.device_count())"',
        fix='init_process_group()  # without a name torch chooses the backend; or "gloo" for the CPU',
    ),
    Rule(
        name="nccl-not-built",
        patterns=(
            r"doesn't have NCCL built in",
            r"(?:not |wasn't )(?:built|compiled) with NCCL",
            r"no module named '?torch\._C\._distributed_c10d\.ProcessGroupNCCL",
            r"ProcessGroupNCCL is not available|NCCL is not available",
            r"NCCL[^\n]{0,40}not (?:supported|available) (?:on|for|in)",
        ),
        what='the script requests the backend "nccl", which needs NVIDIA GPUs and a CUDA build of torch; torch on '
        "{host} is not a CUDA build",
        why="builds for the CPU, Windows and macOS have no NCCL",
        confirm='python -c "import torch; print(torch.__version__, torch.distributed.is_nccl_available())"',
        fix='init_process_group()  # without a name torch chooses the backend; or "gloo"\n'
        "or install a CUDA build of torch on {host} (Linux)",
    ),
    Rule(
        name="nccl-version-mismatch",
        patterns=(
            r"Mismatched NCCL version detected",
            r"undefined symbol: nccl\w+",
            r"NCCL version mismatch|different (?:versions of NCCL|NCCL versions)",
            r"NCCL[^\n]{0,60}incompatible with[^\n]{0,40}version",
        ),
        what="NCCL libraries of different versions are used together: on two hosts, or in one process",
        why="LD_LIBRARY_PATH, LD_PRELOAD or conda load another libnccl instead of the one shipped with torch",
        confirm='python -c "import torch; print(torch.cuda.nccl.version())"   # the same on every host?\n'
        "ldconfig -p | grep nccl; echo $LD_LIBRARY_PATH $LD_PRELOAD; pip list | grep nccl",
        fix="unset LD_PRELOAD; unset LD_LIBRARY_PATH\n"
        "python -m pip install --force-reinstall torch   # the same version on every host",
    ),
    Rule(
        name="peer-access",
        patterns=(
            r"peer access is not supported",
            r"peer mapping resources exhausted",
            r"peer access (?:is )?(?:already|not yet|not) enabled",
            r"Could not enable P2P",
            r"cudaIpcOpenMemHandle[^\n]{0,60}fail|cudaIpcGetMemHandle[^\n]{0,60}fail",
            r"cudaErrorPeerAccess\w+|cudaErrorMapBufferObjectFailed",
            r"doesn't support faster communication broadband via P2P",
            r"NCCL WARN[^\n]{0,40}P2P[^\n]{0,80}(?:fail|error|not supported)",
            r"transport/p2p\.cc:\d+ NCCL WARN(?! Cuda failure[^\n]{0,20}out of memory)",
            r"CUMEM[^\n]{0,60}(?:fail|error)",
        ),
        what="two GPUs of {host} cannot access each other's memory directly (P2P)",
        why="consumer GPUs have no peer access, virtual machines and IOMMU (ACS) break it, and containers may "
        "prevent processes from sharing memory",
        confirm="nvidia-smi topo -p2p r   # OK, or not supported?",
        fix="export NCCL_P2P_DISABLE=1\n"
        "in a container:\ndocker run --ipc=host …\n"
        "with a newer NCCL, disable cuMem:\nexport NCCL_CUMEM_ENABLE=0",
    ),
    Rule(
        name="infiniband-errors",
        patterns=(
            r"(?:Call to |WARN )?ibv_\w+ (?:failed|returned|\(?error)",
            r"Got completion (?:from peer [^\n]{0,80})?with (?:error|status)",
            r"NET/IB ?: [^\n]{0,60}(?:error|fail|unable|async)",
            r"mlx5_\d+[^\n]{0,60}(?:error|fail|fatal|down)",
            r"failed to (?:modify|create) (?:QP|queue pair)",
            r"ib_mlx5|\bibv_(?:reg_mr|create_qp|modify_qp|poll_cq|open_device)",
            r"local (?:protection|QP operation) error|transport retry counter exceeded",
            r"initializing an OpenFabrics device",
        ),
        unless=(r"DefaultCPUAllocator",),
        what="the InfiniBand or RoCE network of {host} failed",
        why="a link is down or lossy, the GID index is wrong (RoCE), or locked memory is limited",
        confirm="ibstat; ibv_devinfo   # State: Active, Physical state: LinkUp?\n"
        "ulimit -l             # unlimited?",
        fix="for RoCE:\nexport NCCL_IB_GID_INDEX=3   # show_gids prints the index\n"
        "choose the adapter:\nexport NCCL_IB_HCA=mlx5_0\n"
        "allow locked memory:\nulimit -l unlimited\n"
        "to continue without InfiniBand:\nexport NCCL_IB_DISABLE=1",
    ),
    Rule(
        name="backend-device-mismatch",
        patterns=(
            r"No backend type associated with device type",
            r"Tensors must be (?:CUDA|GPU) and dense",
            r"ProcessGroupGloo::\w+: (?:invalid|unsupported) (?:tensor type|device|layout)",
            r"Default backend not registered for device",
            r"does not support (?:allreduce|\w+) on (?:cpu|cuda|mps) tensors",
            r"input tensor must be (?:CUDA|a CUDA tensor|on GPU)",
        ),
        what="a tensor is on a device that the process group's backend does not support",
        why="nccl supports GPU tensors only, gloo CPU tensors (and a few operations on GPU tensors)",
        confirm="print(torch.distributed.get_backend(), tensor.device)   # before the call that failed",
        fix='use both: init_process_group("cpu:gloo,cuda:nccl")\n'
        "or move the tensor first: tensor.to(f\"cuda:{os.environ['LOCAL_RANK']}\")",
    ),
    Rule(
        name="nccl-unhandled-cuda-error",
        patterns=(r"unhandled cuda error", r"ncclUnhandledCudaError", r"NCCL WARN Cuda failure"),
        unless=_CUDA_SAYS,
        role=Role.SYMPTOM,
        what="a CUDA call inside NCCL failed; torch does not report which",
        why="common causes: a driver too old for this NCCL, ranks in different containers, no free memory, broken P2P access",
        confirm=_SAY_MORE,
        fix="see the line 'NCCL WARN Cuda failure …', and pass it to muster doctor --explain\n"
        "if it mentions peers or IPC:\nexport NCCL_P2P_DISABLE=1",
    ),
    Rule(
        name="nccl-system-error",
        patterns=(
            r"unhandled system error",
            r"ncclSystemError",
            r"System call \(e\.g\. socket, malloc\) or external library call failed",
        ),
        unless=_ELSE_SAYS,
        role=Role.SYMPTOM,
        what="a system call inside NCCL failed (socket, memory or library); torch does not report which",
        why="common causes: an interface that other hosts cannot reach, a firewall, a full /dev/shm, the open-file limit",
        confirm=_SAY_MORE,
        fix="see the line 'NCCL WARN …', and pass it to muster doctor --explain\n"
        "muster check --hosts A,B   # tests all connections between the hosts",
    ),
    Rule(
        name="nccl-system-error",
        patterns=(
            r"NCCL WARN[^\n]{0,120}(?:Connection (?:refused|timed out))",
            r"Call to connect[^\n]{0,80}(?:Connection (?:refused|timed out))",
            r"(?:ncclSystemError|unhandled system error)…Connection (?:refused|timed out)",
            r"Connection (?:refused|timed out)…(?:ncclSystemError|unhandled system error)",
        ),
        unless=(r"No route to host", r"client socket has", r"gloo", r"ncclRemoteError"),
        role=Role.SYMPTOM,
        what="NCCL could not connect to another rank",
        why="it chose an interface that the other host cannot reach (docker0, lo), a firewall blocks the connection, "
        "or the other rank had exited",
        confirm="NCCL_DEBUG=INFO muster run train.py 2>&1 | grep 'NET/Socket : Using'   # which interface?",
        fix="export NCCL_SOCKET_IFNAME=IFACE   # as `ip route get OTHER-ADDRESS` shows it after dev\n"
        "allow all TCP ports between the hosts:\nsudo ufw allow from OTHER-ADDRESS",
    ),
    Rule(
        name="nccl-internal-error",
        patterns=(
            r"ncclInternalError",
            r"NCCL[^\n]{0,200}, internal error\b",
            r"NCCL error \d+: internal error",
            r"internal error - please report this issue to the NCCL",
        ),
        unless=(*_ELSE_SAYS, *_CUDA_SAYS),
        role=Role.SYMPTOM,
        what="NCCL reported an internal error; torch does not show its message",
        why="common causes: containers with a partial /sys, the topology of a virtual machine, mixed NCCL versions",
        confirm=_SAY_MORE,
        fix="see the line 'NCCL WARN …', and pass it to muster doctor --explain",
    ),
    Rule(
        name="nccl-invalid-usage",
        patterns=(
            r"ncclInvalidUsage",
            r"NCCL[^\n]{0,200}, invalid usage\b",
            r"ncclInvalidArgument",
            r"NCCL error \d+: invalid (?:usage|argument)",
            r"NCCL[^\n]{0,200}, invalid argument",
        ),
        unless=(r"Duplicate GPU detected", *_CUDA_SAYS),
        role=Role.SYMPTOM,
        what="NCCL was called with invalid arguments; most often two ranks have the same GPU",
        why="every rank uses GPU 0 by default",
        confirm=f"nvidia-smi   # one process of the run per GPU?\n{_SAY_MORE}",
        fix=f"{_LOCAL_GPU}\nstart no more ranks than GPUs:\ntorchrun --nproc-per-node gpu …\n"
        "for MIG slices, with NCCL 2.30 or newer:\nexport NCCL_MULTI_RANK_GPU_ENABLE=1",
    ),
)
