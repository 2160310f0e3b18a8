"""What is known of the ways in which ranks end: pattern or exit code, why it happens, what to do.

Tables only; :mod:`torchmuster.launch.verdict` reads them. ``{host}`` in a text is the machine's name,
``{1}`` what the pattern's first group found. The first pattern that is found counts. Negative exit codes are
signals, by their numbers on Linux whatever this machine is.
"""

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Known:
    """A text in an error; ``peer`` if it only says that another rank is gone, or late."""

    pattern: str
    why: str
    fix: str
    peer: Literal["", "gone", "late"] = ""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """An exit code that came without an error's text."""

    words: str
    why: str
    fix: str = ""


_LESS_GPU_MEMORY = (
    "use a smaller batch with gradient accumulation, bf16, activation checkpointing or FSDP; "
    "see who else uses the GPU: muster gpus"
)
_LESS_MEMORY = (
    "use fewer DataLoader workers, smaller batches or fewer ranks on {host}; or allow the job more: "
    "Slurm --mem, Kubernetes resources.limits.memory, docker --memory"
)
_MORE_SHARED_MEMORY = (
    "give it more shared memory: docker run --shm-size=8g (or --ipc=host), in Kubernetes an emptyDir "
    "of medium Memory at /dev/shm; or use DataLoader(num_workers=0)"
)
_LOCAL_GPU = 'let each rank take its own GPU: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
_LOOK_AT_PEERS = "look at the other ranks' logs: the one that went first is the cause"
_PEER_GONE = "another rank, or the machine it was on, went away while this one was talking to it"
_PEER_LATE = (
    "another rank did not come to the same point in time: it hangs, waits for something else, or is "
    "much slower"
)
_RAISE_TIMEOUT = (
    "find out what the other ranks did meanwhile (their logs); if one is only slow: "
    "init_process_group(timeout=timedelta(minutes=30))"
)

ERRORS: tuple[Known, ...] = (
    Known(
        pattern=r"The connection to etcd has failed|etcd\.EtcdConnectionFailed",
        why="the etcd server at which the agents meet stopped answering",
        fix="curl http://HOST:2379/health  # and look at the server's log",
    ),
    Known(
        pattern=r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        why="the GPU has no memory left for what this step needs",
        fix=_LESS_GPU_MEMORY,
    ),
    Known(
        pattern=r"DataLoader worker .*killed by signal: Bus error"
        r"|unable to (?:allocate|open|mmap) shared memory|unable to write to file </torch_",
        why="shared memory (/dev/shm) is full; DataLoader workers hand their batches over in it",
        fix=_MORE_SHARED_MEMORY,
    ),
    Known(
        pattern=r"DataLoader worker .*(?:killed by signal: Killed|exited unexpectedly)",
        why="a DataLoader worker was killed, most often because the machine's memory was used up",
        fix=_LESS_MEMORY,
    ),
    Known(
        pattern=r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|^MemoryError"
        r"|Cannot allocate memory",
        why="the machine, or this job's share of it, has no memory left",
        fix=_LESS_MEMORY,
    ),
    Known(
        pattern=r"compiled using NumPy 1\.x cannot be run|numpy\.dtype size changed"
        r"|_ARRAY_API not found|numpy\.core\.multiarray failed to import|Numpy is not available",
        why="a package was built for another version of NumPy than the one installed on {host}",
        fix='python -m pip install "numpy<2"  # or a newer version of the package that complains',
    ),
    Known(
        pattern=r"No module named '?([\w.]+)'?",  # runpy leaves out the quotes
        why="{1} is not installed in the environment that this rank ran in on {host}",
        fix="python -m pip install {1}  # on {host}; a package's name can differ from its module's",
    ),
    Known(
        pattern=r"invalid device ordinal",
        why="the script asked for a GPU number that this rank cannot see; numbers begin at 0 on "
        "every machine and count only the GPUs given to the run",
        fix=_LOCAL_GPU,
    ),
    Known(
        pattern=r"Duplicate GPU detected",
        why="two ranks use the same GPU, which NCCL does not do",
        fix=_LOCAL_GPU,
    ),
    Known(
        pattern=r"EADDRINUSE|[Aa]ddress already in use"
        r"|failed to listen on any local network address",
        why="the port that is to be opened is in use by another program",
        fix='leave the address to the launcher: init_process_group() or init_method="env://"; or see '
        "who has it: ss -ltnp",
    ),
    Known(
        pattern=r"ProcessGroupNCCL is only supported with GPUs|doesn't have NCCL built in",
        why='the script asks for the backend "nccl", which needs NVIDIA GPUs and a torch built for '
        "them; this rank has none",
        fix='init_process_group()  # without a name torch takes what fits; or "gloo" for the CPU',
    ),
    Known(
        pattern=r"Torch not compiled with CUDA enabled|Found no NVIDIA driver",
        why="the script uses CUDA, and torch on {host} is built without it or finds no driver",
        fix="install a CUDA build of torch and the driver on {host}, or use the CPU in the script",
    ),
    Known(
        pattern=r"driver .* is too old|CUDA driver version is insufficient",
        why="torch on {host} was built for a newer CUDA than its driver knows",
        fix="update the NVIDIA driver on {host}, or install torch for an older CUDA",
    ),
    Known(
        pattern=r"no kernel image is available",
        why="torch on {host} was not built for this model of GPU",
        fix="install a torch whose build includes the GPU: torch.cuda.get_arch_list() shows which",
    ),
    Known(
        pattern=r"device-side assert triggered",
        why="a GPU kernel was given an impossible value, most often a label or an index out of range",
        fix="run it once with CUDA_LAUNCH_BLOCKING=1, or on the CPU: the traceback is then exact",
    ),
    Known(
        pattern=r"uncorrectable ECC|fallen off the bus|unspecified launch failure"
        r"|devices? (?:is|are) busy or unavailable",
        why="the GPU itself is in trouble, or another process holds it alone",
        fix="look at it: muster gpus and nvidia-smi -q on {host}; dmesg there names Xid errors",
    ),
    Known(
        pattern=r"Cannot re-initialize CUDA in forked subprocess",
        why="a process that was forked after CUDA had been used cannot use CUDA",
        fix='start workers afresh: DataLoader(multiprocessing_context="spawn")',
    ),
    Known(
        pattern=r"CUDA error: ([^\n]+)",
        why="CUDA reported: {1}. It reports late, so the traceback may point at a later line",
        fix="run it once with CUDA_LAUNCH_BLOCKING=1: the traceback is then exact",
    ),
    Known(
        pattern=r"use_libuv was requested but PyTorch was buil[dt] without libuv",
        why="this build of torch lacks libuv, and its store asks for it by default",
        fix="set USE_LIBUV=0 in the environment of the run",
    ),
    Known(
        pattern=r"Is there a distributed collective mismatch|Mismatch between collective",
        why="ranks called different collectives, or the same one with tensors of different sizes",
        fix="run it once with TORCH_DISTRIBUTED_DEBUG=DETAIL: it names the rank and the operation",
    ),
    Known(
        pattern=r"Expected to have finished reduction in the prior iteration",
        why="some parameters took no part in the loss, and DDP waits for their gradients",
        fix="DistributedDataParallel(model, find_unused_parameters=True), or use every parameter",
    ),
    Known(
        pattern=r"Default process group has not been initialized",
        why="a collective was called before the group was there",
        fix="call torch.distributed.init_process_group() first",
    ),
    Known(
        pattern=r"Unable to find address for: (\S+)|Bootstrap : no socket interface found",
        why="GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names a network interface that {host} lacks",
        fix="unset both; the launcher chooses the interface on each machine",
    ),
    Known(
        pattern=r"Temporary failure in name resolution|Name or service not known",
        why="{host} cannot find the address of a name, often its own",
        fix="put the name into /etc/hosts on {host}, or use addresses",
    ),
    Known(
        pattern=r"Too many open files",
        why="this rank has as many files and sockets open as it may",
        fix="raise the limit on {host} (ulimit -n 65536), or use fewer DataLoader workers",
    ),
    Known(
        pattern=r"No space left on device",
        why="a disk that the script writes to is full on {host}",
        fix="make room: df -h shows which one is full",
    ),
    Known(
        pattern=r"FileNotFoundError.*?'([^'\n]+)'",
        why="{1} does not exist on {host}; every machine needs its own copy or a shared disk",
        fix="copy it to {host}, or give the path as it is there",
    ),
    Known(
        pattern=r"unrecognized arguments: --local[-_]rank",
        why="the script expects its rank as an argument, as launchers of long ago gave it",
        fix='read it from the environment: int(os.environ["LOCAL_RANK"])',
    ),
    Known(
        pattern=r"monitoredBarrier|Timed out waiting \d+ms for (?:recv|send) operation"
        r"|Watchdog caught collective operation timeout|collective operation timed out",
        why=_PEER_LATE,
        fix=_RAISE_TIMEOUT,
        peer="late",
    ),
    Known(
        pattern=r"wait timeout after \d+ms|waiting for clients\. \d+/\d+ clients joined"
        r"|client socket has timed out|[Ss]ocket [Tt]imeout|[Ss]tore.{0,80}timed out",
        why="another rank did not come to the meeting point in time: it ended before, hangs, or its "
        "machine cannot reach this one",
        fix=_LOOK_AT_PEERS,
        peer="late",
    ),
    Known(
        pattern=r"connectFullMesh failed",
        why="the ranks could not connect to each other",
        fix="where no rank failed before, a firewall or a wrong interface is between the machines",
        peer="gone",
    ),
    Known(
        # A refused download is the script's own affair, so the bare words need torch's name near them.
        pattern=r"Connection closed by (?:remote )?peer|ncclRemoteError|remote process exited"
        r"|recvValue|Failed to recv, got|DistNetworkError|RendezvousConnectionError"
        r"|(?:gloo|Gloo|c10d|nccl|NCCL|torch\.distributed|TCPStore)(?:.|\n)*"
        r"(?:Connection (?:reset|refused)|Broken pipe)",
        why=_PEER_GONE,
        fix=_LOOK_AT_PEERS,
        peer="gone",
    ),
    Known(
        pattern=r"nccl(?:UnhandledCudaError|SystemError|InternalError|InvalidUsage)",
        why="NCCL failed; torch hides what it said",
        fix="run it once with NCCL_DEBUG=WARN: NCCL then names the cause in this rank's log",
    ),
)

OUT_OF_MEMORY = Exit(
    words="killed by the kernel: out of memory",
    why="the machine, or this job's share of it, had no memory left",
    fix=_LESS_MEMORY,
)

EXITS: dict[int, Exit] = {
    -9: Exit(
        words="killed (SIGKILL)",
        why="it was killed from outside: kill -9, a scheduler's limit, systemd-oomd or earlyoom",
        fix="ask the scheduler (sacct -j JOB), or journalctl and dmesg on {host}, who did it",
    ),
    -6: Exit(
        words="aborted (SIGABRT)",
        why="a C++ library gave up, which Python cannot catch; the lines above tell more",
        fix="read the end of its log; TORCH_SHOW_CPP_STACKTRACES=1 shows where it was",
    ),
    -7: Exit(
        words="bus error (SIGBUS)",
        why="it touched memory that could not be had: most often /dev/shm is full (DataLoader)",
        fix=_MORE_SHARED_MEMORY,
    ),
    -11: Exit(
        words="segmentation fault (SIGSEGV)",
        why="native code touched memory that is not its own: a broken or mismatched extension",
        fix="the stack in its log names the library; reinstall it for this torch and Python",
    ),
    -4: Exit(
        words="illegal instruction (SIGILL)",
        why="a library was built for a newer processor than the one of {host}",
        fix="install builds made for this processor on {host}",
    ),
    -8: Exit(
        words="arithmetic fault (SIGFPE)",
        why="native code divided an integer by zero",
        fix="the stack in its log names the library",
    ),
    -15: Exit(
        words="ended from outside (SIGTERM)",
        why="somebody asked it to end: a scheduler, a service manager, or kill",
        fix="ask the scheduler, or journalctl on {host}, who did it",
    ),
    -2: Exit(
        words="interrupted (SIGINT)",
        why="somebody interrupted it: Ctrl-C, or kill -2",
    ),
    -10: Exit(
        words="ended by SIGUSR1",
        why="a scheduler sends this signal as a warning, and the script has no handler for it",
        fix="signal.signal(signal.SIGUSR1, …) in the script, and save a checkpoint there",
    ),
    -12: Exit(
        words="ended by SIGUSR2",
        why="a scheduler sends this signal as a warning, and the script has no handler for it",
        fix="signal.signal(signal.SIGUSR2, …) in the script, and save a checkpoint there",
    ),
    -24: Exit(
        words="ended by SIGXCPU",
        why="its allowance of processor time (ulimit -t) was used up",
        fix="raise the limit on {host}: ulimit -t unlimited",
    ),
    0: Exit(
        words="ended early, with exit code 0",
        why="it ended well while others still needed it",
        fix="let all ranks do the same number of steps",
    ),
    1: Exit(
        words="exit code 1, without a traceback",
        why="the script ended itself, or a launcher inside it did, and hid the error",
        fix="read the end of its log",
    ),
    2: Exit(
        words="exit code 2",
        why="the script did not understand its arguments (argparse ends with 2)",
        fix="compare the arguments after the script's name with what it knows: python SCRIPT --help",
    ),
    126: Exit(
        words="exit code 126: not executable",
        why="a program was found on {host}, but may not be run",
        fix="chmod +x it on {host}, or see whether its disk is mounted noexec",
    ),
    127: Exit(
        words="exit code 127: command not found",
        why="a program that was called is not installed on {host}, or not in its PATH",
        fix="install it on {host}, or give its whole path",
    ),
}


def known(text: str) -> tuple[Known, re.Match[str]] | None:
    """Return what is known of an error with this text, and where the pattern was found."""
    for one in ERRORS:
        if found := re.search(one.pattern, text, re.MULTILINE):
            return one, found
    return None


def by_signal(exit_code: int) -> int:
    """Return -9 for 137, which is how shells report a signal; other codes as they are."""
    return 128 - exit_code if 128 < exit_code <= 128 + 64 else exit_code


def exit_of(exit_code: int) -> Exit:
    """Return what is known of an exit code."""
    code = by_signal(exit_code)
    if code in EXITS:
        return EXITS[code]
    if code < 0:
        return Exit(words=f"ended by signal {-code}", why="somebody sent it this signal")
    return Exit(
        words=f"exit code {exit_code}",
        why="the script ended itself with this code (sys.exit) and showed no traceback",
        fix="read the end of its log",
    )
