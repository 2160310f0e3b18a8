"""Errors of CUDA kernels and libraries while a script runs."""

from torchmuster.known_errors.rule import Role, Rule

_EXACT = "CUDA_LAUNCH_BLOCKING=1 python train.py   # the traceback then points at the exact line"

RULES = (
    Rule(
        name="device-side-assert",
        patterns=(
            r"device-side assert(?:ion)? (?:triggered|failed)",
            r"\.cuh?:\d+:[^\n]{0,600}Assertion `",
            r"cudaErrorAssert\b",
            r"Xid \([^)\n]*\): ?13\b[^\n]{0,80}assert",
        ),
        what="a GPU kernel got an invalid value, most often a label or an index out of range",
        why="a class label is out of range for the number of classes, or a token id for the vocabulary size of the embedding",
        confirm=f"{_EXACT}\nprint(labels.min(), labels.max(), tokens.max())   # before the call that failed",
        fix="run it once with CUDA_LAUNCH_BLOCKING=1, or on the CPU: the traceback is then exact\n"
        "then fix the data, or enlarge the layer: model.resize_token_embeddings(len(tokenizer))",
    ),
    Rule(
        name="illegal-memory-access",
        patterns=(
            r"illegal memory access",
            r"misaligned address",
            r"cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorMisalignedAddress",
            r"an illegal instruction was encountered",
            r"Xid \([^)\n]*\): ?31\b",
            r"Memory access fault by GPU",
        ),
        what="a GPU kernel accessed invalid memory",
        why="a bug in a custom kernel or extension, an index out of range, or a tensor on a GPU other than the "
        "current one; if it happens on one host only, perhaps a faulty GPU",
        confirm=f"{_EXACT}\ncompute-sanitizer --tool memcheck python train.py",
        fix="run it once with CUDA_LAUNCH_BLOCKING=1: the traceback is then exact\n"
        "update or rebuild the extension that the traceback names; set the device first: torch.cuda.set_device(local_rank)",
    ),
    Rule(
        name="no-virtual-memory-management",
        patterns=(r"CUDA driver error: operation not supported",),
        what="the GPU does not support virtual memory management, which torch's expandable segments need",
        why="it is a virtual GPU (vGPU) whose profile does not include it; muster train enables expandable segments",
        confirm="nvidia-smi -q | grep -i 'virtualization mode'   # VGPU?",
        fix="muster train … --env PYTORCH_ALLOC_CONF=expandable_segments:False\n"
        "with another launcher: export PYTORCH_ALLOC_CONF=expandable_segments:False",
    ),
    Rule(
        name="launch-failure",
        patterns=(
            r"unspecified launch failure",
            r"cudaErrorLaunchFailure|CUDA_ERROR_LAUNCH_FAILED",
            r"CUDA error: the launch timed out",
        ),
        what="a GPU kernel crashed, and the driver does not report why",
        why="a bug in a kernel, or a GPU hardware problem: heat, power, memory",
        confirm=f"sudo dmesg | grep -i xid\n{_EXACT}",
        fix="inspect the GPU: muster gpus and nvidia-smi -q on {host}; dmesg there shows Xid errors\n"
        "if it is always the same line: update torch or the extension; if always the same GPU: exclude it",
    ),
    Rule(
        name="cuda-fork",
        patterns=(
            r"Cannot re-initialize CUDA in forked subprocess",
            r"CUDA error: initialization error",
            r"cuda runtime error \(3\) ?: initialization error",
            r"CUDA with multiprocessing, you must use the 'spawn' start method",
            r"cudaErrorInitializationError",
        ),
        what="a process forked after CUDA was initialized cannot use CUDA",
        confirm="grep -n 'cuda' train.py   # what uses the GPU before workers start, or inside the dataset?",
        fix='spawn the workers: DataLoader(multiprocessing_context="spawn")\n'
        'or torch.multiprocessing.set_start_method("spawn"), or keep the dataset on the CPU',
    ),
    Rule(
        name="cublas-error",
        patterns=(
            r"CUBLAS_STATUS_(?!ALLOC_FAILED)[A-Z_]+",
            r"cublas runtime error",
            r"cublasLt ran into an error|cublas error",
        ),
        unless=(r"CUBLAS_STATUS_ALLOC_FAILED",),
        role=Role.SYMPTOM,
        what="a matrix product failed in cuBLAS",
        why="most often the GPU's memory is full, shapes or indices are wrong, or a cuBLAS other than torch's was "
        "loaded",
        confirm=f"nvidia-smi   # is memory nearly full?\n{_EXACT}",
        fix="try a smaller batch first; then make sure that no other cuBLAS is loaded:\n"
        "unset LD_LIBRARY_PATH\n"
        "if shapes are wrong, the same line on the CPU raises the actual error",
    ),
    Rule(
        name="cudnn-error",
        patterns=(
            r"CUDNN_STATUS_[A-Z_]+",
            r"Unable to find a valid cuDNN algorithm",
            r"cuDNN version incompatib",
            r"cuDNN error",
            r"FIND was unable to find an engine|GET was unable to find an engine",
            r"Could not create cudnn handle|cuDNN launch failure",
            r"Loaded runtime CuDNN library",
            r"cuDNN[^\n]{0,40}(?:compiled against|incompatible)",
        ),
        unless=(
            r"undefined symbol",
            r"cannot open shared object file",
        ),
        role=Role.SYMPTOM,
        what="a cuDNN call failed",
        why="most often the GPU's memory is full, or a cuDNN other than torch's was loaded",
        confirm='nvidia-smi; echo "$LD_LIBRARY_PATH"\n'
        'python -c "import torch; print(torch.backends.cudnn.version())"; ldconfig -p | grep cudnn',
        fix="unset LD_LIBRARY_PATH\n"
        "try a smaller batch, or disable cuDNN: torch.backends.cudnn.enabled = False\n"
        "python -m pip install --force-reinstall torch   # includes the matching cuDNN",
    ),
    Rule(
        name="cuda-error",
        patterns=(
            r"CUDA error: (?P<said>[\w ,.-]+)",
            r"cuda runtime error \(\d+\) ?: (?P<said>[\w ]+)",
        ),
        unless=(
            r"out of memory|unknown error|illegal memory|misaligned|device-side assert|launch fail",
            r"invalid device ordinal|no kernel image|busy or unavailable|initialization error",
            r"ECC error|CUBLAS_STATUS|insufficient|no CUDA-capable|not yet initialized|peer ",
            r"unsupported toolchain|driver combination|invalid device function|illegal instruction",
            r"launch timed out|non supported HW",
        ),
        role=Role.SYMPTOM,
        what="CUDA reported: {said}",
        why="CUDA errors are asynchronous, so the traceback may point at a later line",
        confirm=_EXACT,
        fix="run it once with CUDA_LAUNCH_BLOCKING=1: the traceback is then exact",
    ),
)
