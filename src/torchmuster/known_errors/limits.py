"""Limits of a process and its workers: files, threads, time, disks."""

from torchmuster.known_errors.rule import Role, Rule

RULES = (
    Rule(
        name="dataloader-worker-killed",
        patterns=(
            r"DataLoader worker…killed by signal: (?!Bus error|Segmentation)\w+",
            r"DataLoader worker[^\n]{0,400}exited unexpectedly",
        ),
        unless=(
            r"insufficient shared memory|out of shared memory|bus error",
            r"Segmentation fault|segmentation fault",
            r"Too many open files|0 items of ancdata",
            r"bootstrapping phase",
        ),
        role=Role.SYMPTOM,
        what="a DataLoader worker was killed, most often because the host ran out of memory",
        confirm="sudo dmesg -T | grep -i 'killed process'\n"
        "run it once with DataLoader(num_workers=0), which shows errors of the dataset itself",
        fix="use fewer DataLoader workers, smaller batches or fewer ranks on {host}; or raise the job's limit: "
        "Slurm --mem, Kubernetes resources.limits.memory, docker --memory",
    ),
    Rule(
        name="dataloader-timeout",
        patterns=(r"DataLoader timed out after \d+",),
        what="the DataLoader waited too long for its workers",
        why="a sample takes longer than DataLoader(timeout=…), the disk is slow, or a worker hangs on a lock that "
        "was held when it was forked",
        confirm="py-spy dump --pid PID   # of a worker: pgrep -f train.py\niostat -x 2",
        fix="raise or remove the timeout: DataLoader(timeout=0), and use more workers\n"
        'if a worker hangs: DataLoader(multiprocessing_context="spawn"); OpenCV: cv2.setNumThreads(0)',
    ),
    Rule(
        name="too-many-open-files",
        patterns=(
            r"Too many open files",
            r"received \d+ items of ancdata",
            r"\bEMFILE\b|\[Errno 24\]",
        ),
        what="this rank reached its limit of open files and sockets",
        why="DataLoader workers send tensors as open files, which stay open as long as the script keeps the tensors",
        confirm="ulimit -n; ls /proc/PID/fd | wc -l",
        fix="raise the limit on {host} (ulimit -n 65536), or use fewer DataLoader workers\n"
        'or share tensors through named files: torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
    Rule(
        name="too-many-threads",
        patterns=(
            r"can't start new thread",
            r"pthread_create (?:failed|\w+ failed)|pthread_create[^\n]{0,60}Resource temporarily unavailable",
            r"Thread creation failed",
            r"Resource temporarily unavailable",
            r"blas_thread_init",
            r"fork: retry|Cannot fork|can't fork",
            r"unable to allocate necessary resources for OMP thread",
        ),
        what="no more threads or processes can be started on {host}",
        why="each worker of each rank starts one thread per core, which exceeds the limit of the user or container",
        confirm='ulimit -u; ps -eLf | wc -l; cat /sys/fs/cgroup/pids.max\necho "$OMP_NUM_THREADS"',
        fix="export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1\n"
        "use fewer DataLoader workers, or raise the limit:\nulimit -u 65536\ndocker run --pids-limit=-1 …   # a container",
    ),
    Rule(
        name="disk-full",
        patterns=(
            r"No space left on device",
            r"Disk quota exceeded",
            r"unexpected pos \d+ vs \d+",
            r"file write failed",
            r"PytorchStreamWriter failed writing",
            r"There is not enough space on the disk|WinError 112\b",
            r"\[Errno 28\]",
            r"Not enough free disk space",
            r"\bENOSPC\b",
        ),
        unless=(
            r"/dev/shm|shared memory|posix_fallocate",  # noqa: S108
            r"multiprocessing/(?:heap|synchronize|shared_memory)|SemLock",
            r"</torch_",
        ),
        what="a disk that the script writes to is full on {host}, or your quota is used up",
        confirm="df -h . /tmp ~; df -i .   # free space, free inodes\nquota -s",
        fix="free some space: df -h shows which disk is full\n"
        "write elsewhere:\nexport TMPDIR=/big/tmp HF_HOME=/big/hf",
    ),
    Rule(
        name="permission-denied",
        patterns=(
            r"PermissionError: \[Errno (?:13|1)\][^\n:]*(?:: '(?P<path>[\w./ -]+)')?",
            r"PermissionError: \[WinError 5\]",
            r"permission denied while trying to connect to the Docker daemon",
            r"(?:/[\w./-]+): Permission denied",
            r"Operation not permitted",
            r"Read-only file system",
        ),
        unless=(
            r"Permission denied \((?:publickey|password|gssapi|keyboard)",
            r"\.bind\(|EACCES|failed to bind|forbidden by its access",
            r"operation not permitted when",
            r"shared memory",
        ),
        what="this user is not allowed to read or write a file or device on {host}",
        why="on clusters, the file is often in a cache or folder that another user, or root in a container, created",
        confirm="id; ls -ld {path}",
        fix="write to your own folders:\nexport HF_HOME=$HOME/hf TORCH_HOME=$HOME/torch TMPDIR=$HOME/tmp\n"
        "sudo chown -R $USER {path}   # if it should belong to you\n"
        "Docker:\nsudo usermod -aG docker $USER   # then log in again",
    ),
    Rule(
        name="file-not-found",
        patterns=(
            r"FileNotFoundError[^\n]*?'(?P<path>[\w./ :\\-]+)'",
            r"FileNotFoundError: (?:\[Errno 2\]|\[WinError [23]\])",
            r"can't open file '(?P<path>[\w./ :\\-]+)': \[Errno 2\]",
            r"NotADirectoryError: \[Errno 20\]",
            r"execve\(\): (?P<path>[\w./-]+): No such file or directory",
            r"\[Errno 2\] No such file or directory(?:: '(?P<path>[\w./ :\\-]+)')?",
        ),
        unless=(
            r"'[\w/.:-]*nvcc'|CUDA_HOME",
            r"</torch_",
            r"multiprocessing/(?:connection|resource_sharer|reduction)",
        ),
        what="{path} does not exist on {host}; every host needs its own copy or a shared disk",
        why="the path exists only on another host, is relative to another folder, or another rank is still creating it",
        confirm="ls -l {path}   # on every host; relative paths start at pwd",
        fix="copy it to {host}, or use the path that is valid there\n"
        "if rank 0 creates it: torch.distributed.barrier() before the others open it",
    ),
)
