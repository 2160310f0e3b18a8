"""GPU memory, host memory and shared memory."""

from torchmuster.known_errors.rule import Role, Rule

_LESS_MEMORY = (
    "use fewer DataLoader workers, smaller batches or fewer ranks on {host}; or raise the job's limit: "
    "Slurm --mem, Kubernetes resources.limits.memory, docker --memory"
)
_WHO_WAS_KILLED = (
    "sudo dmesg -T | grep -i -E 'out of memory|oom-kill|killed process'\n"
    "free -g; cat /sys/fs/cgroup/memory.events   # oom_kill above 0: the job's own limit"
)

RULES = (
    Rule(
        name="gpu-out-of-memory",
        patterns=(
            r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory",
            r"(?:CUDA|HIP) error: out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
            r"Cuda failure (?:\d+ )?'out of memory'",
            r"cuda runtime error \(2\) ?: out of memory",
            r"torch(?:\.cuda)?\.OutOfMemoryError",
            r"cudaMalloc[^\n]{0,40}out of memory",
            r"(?:error|failed)[^\n]{0,40}out of memory at [^\n]+\.cu",
            r"cudaGetDeviceCount…Error 2: out of memory",
            r"error=2 ?: out of memory",
            r"CUDA (?:driver )?error[: \d]*out of memory",
            r"Tried to allocate [\d.]+ [KMG]i?B",
            r"Failed to CUDA (?:m|c)alloc",
            r"OOM when allocating tensor",
            r"RESOURCE_EXHAUSTED: Out of memory",
            r"Free memory on device[^\n]{0,80}is less than desired",
            r"No available memory for the cache blocks",
        ),
        what="the GPU does not have enough free memory for this step",
        why="the model's weights, gradients, optimizer state and activations, or another process, use the memory",
        confirm="nvidia-smi   # who uses it? muster gpus shows the owners\n"
        "print(torch.cuda.memory_summary())   # before the step that failed",
        fix="use a smaller batch with gradient accumulation, bf16, activation checkpointing or FSDP; "
        "see who else uses the GPU: muster gpus\n"
        "if much is 'reserved but unallocated':\nexport PYTORCH_ALLOC_CONF=expandable_segments:True\n"
        'when all ranks load at once: torch.load(…, map_location="cpu")',
    ),
    Rule(
        name="host-out-of-memory",
        patterns=(
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"(?<![\w.])(?:\w+\.)*_?(?:Array)?MemoryError\b",
            r"\[Errno 12\] Cannot allocate memory",
            r"Cannot allocate memory",
            r"std::bad_alloc",
            r"Unable to allocate [\d.]+ [KMGT]iB for an array",
            r"Out of memory: Kill(?:ed)? process",
            r"Memory cgroup out of memory",
            r"oom[-_]kill:constraint|invoked oom-killer|oom_reaper",
            r"OOMKilled",
            r"running low on memory|ray\.exceptions\.OutOfMemoryError",
            r"paging file is too small|WinError 1455",
            r"Failed to allocate[^\n]{0,40}(?:host|CPU) memory",
            r"CPUAllocator\.cpp",
            r"not enough memory: you tried to allocate",
            r"Buy new RAM",
            r"bad allocation",
            r"can't allocate memory: you tried",
        ),
        unless=(
            r"ibv_\w+",
            r"oom_kill event|slurmstepd: error: Detected \d+ oom",
            r"RLIMIT_MEMLOCK|cudaHostRegister",
            r"shared memory \(shm\)|unable to mmap [^\n]*/torch_",
        ),
        what="the host, or this job's memory limit, has no memory left",
        why="each rank loads its own copy of the model, and each DataLoader worker its own copy of the "
        "dataset's contents",
        confirm=_WHO_WAS_KILLED,
        fix=f"{_LESS_MEMORY}\nload models without a copy per rank: torch.load(…, mmap=True)",
    ),
    Rule(
        name="killed-sigkill",
        patterns=(
            r"exit ?code ?:? ?-9\b",
            r"Signal 9 \(SIGKILL\)",
            r"Signals\.SIGKILL: 9",
            r"return code ?=? ?-9\b",
            r"terminated with signal SIGKILL",
            r"exit(?:ed)? (?:with )?(?:code|status):? 137\b",
            r"exited on signal 9",
            r"received by PID \d+…SIGKILL",
            r"^Killed$",
            r"\d+ Killed\s+\S*python",
            r"(?<!signals\.)\bSIGKILL\b",
            r"signal:? 9\b",
            r"zsh: killed",
        ),
        unless=(r"oom_kill event|oom-kill|Out of memory: Kill|OOMKilled",),
        role=Role.SYMPTOM,
        what="a process was killed by SIGKILL; the text does not show what sent the signal",
        why="most often the kernel kills a process because the host or the job ran out of memory; other causes are a "
        "scheduler's limit and a user's kill -9",
        confirm=_WHO_WAS_KILLED,
        fix=f"if it was memory: {_LESS_MEMORY}\n"
        "else ask the scheduler: sacct -j JOB --format=State,ExitCode,MaxRSS,ReqMem",
    ),
    Rule(
        name="shared-memory-full",
        patterns=(
            r"killed by signal: Bus error",
            r"Unexpected bus error encountered in worker",
            r"insufficient shared memory",
            r"out of shared memory",
            r"unable to (?:allocate|open|mmap|write|resize)[^\n]{0,40}shared memory",
            r"unable to (?:write to|resize|mmap)[^\n]{0,40}file </torch_",
            r"Error while (?:creating|attaching)[^\n]{0,20} shared memory segment",
            r"(?:posix_fallocate|ftruncate)[^\n]{0,60}(?:No space left|fail)",
            r"/dev/shm[^\n]{0,80}(?:No space left|full|too small|fail)",  # noqa: S108
            r"No space left on device[^\n]{0,40}/dev/shm",
            r"(?:multiprocessing/(?:heap|synchronize|shared_memory)|SemLock)…No space left on device",
            r"Signal 7 \(SIGBUS\)|exit ?code ?:? ?-7\b|Signals\.SIGBUS",
            r"Bus error \(core dumped\)",
            r"\bSIGBUS\b",
            r"\bBus error\b",
            r"(?:fail\w*|error|unable)[^\n]{0,60}/dev/shm",
            r"shm_?open[^\n]{0,40}fail",
        ),
        unless=(r"Too many open files",),
        what="shared memory (/dev/shm) is full; DataLoader workers pass batches through it, and NCCL uses it too",
        why="containers get 64 MB of it by default",
        confirm="df -h /dev/shm; ls -l /dev/shm   # is it full? with files of dead runs?",
        fix="give the container more shared memory:\ndocker run --shm-size=8g …   # or --ipc=host\nin Kubernetes, mount an "
        "emptyDir with medium: Memory at /dev/shm; or use DataLoader(num_workers=0)\n"
        "on your own host:\nsudo mount -o remount,size=90% /dev/shm",
    ),
    Rule(
        name="pinned-memory",
        patterns=(
            r"RLIMIT_MEMLOCK",
            r"cudaHostRegister",
            r"cudaHostAlloc[^\n]{0,60}(?:fail|error)|CUDA host alloc(?:ation)?",
            r"Need to provide pin_memory allocator",
            r"cannot pin '[^\n]+' only dense CPU tensors can be pinned",
            r"(?:memlock|locked memory)[^\n]{0,60}(?:too (?:low|small)|limit|exceed)",
            r"fail\w* to (?:pin|lock)[^\n]{0,30}memory",
            r"pin_memory[^\n]{0,40}(?:failed|error:)",
            r"mlock[^\n]{0,20} failed|max locked memory",
            r"cudaMallocHost[^\n]{0,40}(?:fail|error)",
        ),
        what="memory could not be pinned (locked) on {host}",
        why="locked memory is limited for this user, WSL2 allows only part of the memory, or the tensor is already "
        "on the GPU",
        confirm="ulimit -l   # unlimited?\nfree -g",
        fix="ulimit -l unlimited\ndocker run --ulimit memlock=-1 …   # a container\n"
        "or disable it: DataLoader(pin_memory=False)",
    ),
)
