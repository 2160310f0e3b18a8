"""GPUs, their driver, and the CUDA build of torch."""

from torchmuster.known_errors.rule import Role, Rule

_GPU_AND_TORCH = (
    "nvidia-smi\n"
    'python -c "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"'
)
_CUDA_BUILD = "install a CUDA build of torch and the driver on {host}, or use the CPU in the script"
_LOCAL_GPU = 'let each rank use its own GPU: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'

RULES = (
    Rule(
        name="no-cuda-build",
        patterns=(
            r"Torch not compiled with CUDA enabled",
            r"PyTorch was compiled without CUDA support",
            r"Cannot initialize CUDA without ATen_cuda library",
            r"PyTorch (?:is|was) not (?:compiled|built) with CUDA",
            r"torch[^\n]{0,20}\+cpu[^\n]{0,80}(?:no|without|not) CUDA",
            r"'torch\._C' has no attribute '_cuda_\w+'",
        ),
        what="the script uses CUDA, but torch on {host} is a CPU-only build",
        why="the CPU build was installed, perhaps as a dependency of another package",
        confirm=_GPU_AND_TORCH,
        fix=_CUDA_BUILD,
    ),
    Rule(
        name="no-driver",
        patterns=(
            r"Found no NVIDIA driver",
            r"couldn't communicate with the NVIDIA driver",
            r"NVML(?:Error_|: )?(?:LibraryNotFound|DriverNotLoaded|Shared Library Not Found)",
            r"NVML Shared Library Not Found|NVML: Driver Not Loaded|Driver Not Loaded",
            r"nvidia-smi: (?:command )?not found",
            r"modprobe: FATAL: Module nvidia not found",
            r"kernel driver does not appear to be running",
            r"NVIDIA (?:kernel )?driver is not (?:loaded|running|installed)",
        ),
        unless=(r"nvidia-container-cli",),
        what="the script uses CUDA, but the NVIDIA driver of {host} is not installed or not loaded",
        why="the driver must be rebuilt after a kernel update; a container sees the driver only if started with "
        "--gpus; a login node may have none",
        confirm="nvidia-smi; lsmod | grep nvidia; dkms status",
        fix="sudo modprobe nvidia   # after a kernel update: reinstall the driver, then sudo reboot\n"
        "in a container:\ndocker run --gpus all …\n"
        "without an NVIDIA GPU: use the CPU in the script",
    ),
    Rule(
        name="no-gpu-visible",
        patterns=(
            r"No CUDA GPUs are available",
            r"no CUDA-capable device is detected",
            r"cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE",
            r"deserialize object on a CUDA device but torch\.cuda\.is_available\(\) is False",
            r"CUDA (?:is )?not available|Cuda is not available",
            r"No supported gpu backend found|No (?:GPU|CUDA device)s? (?:found|available|detected)",
            r"CUDAAccelerator. can not run on your system",
            r"No HIP GPUs are available",
            r"No devices were found",
            r"Failed to infer device type",
            r"torch\.cuda\.is_available\(\) (?:is|returns|returned|==) False",
            r"CUDA available: False",
            r"returned 100\b…no CUDA-capable",
        ),
        unless=(
            r"ProcessGroupNCCL is only supported with GPUs",
            r"device_type of 'cuda', but CUDA is not available",
        ),
        role=Role.SYMPTOM,
        what="{host} has a driver, but this process sees no GPU",
        why="CUDA_VISIBLE_DEVICES is empty or names no existing GPU, the job requested no GPU from the scheduler, the "
        "container was started without GPUs, or torch is a CPU build",
        confirm=f'echo "CUDA_VISIBLE_DEVICES=[$CUDA_VISIBLE_DEVICES]"\n{_GPU_AND_TORCH}',
        fix="unset CUDA_VISIBLE_DEVICES\n"
        "request GPUs:\nsbatch --gpus-per-node=1 …   # Slurm\ndocker run --gpus all …         # a container\n"
        'load a checkpoint without a GPU: torch.load(FILE, map_location="cpu")',
    ),
    Rule(
        name="driver-too-old",
        patterns=(
            r"driver[^\n]{0,40} is too old",
            r"CUDA driver version is insufficient",
            r"cudaErrorInsufficientDriver",
            r"provided PTX was compiled with an unsupported toolchain",
            r"unsatisfied condition: cuda ?>=",
            r"cudaGetDeviceCount…Error 35\b",
        ),
        what="torch on {host} was built for a newer CUDA version than the driver supports",
        confirm="nvidia-smi | head -4                                   # CUDA Version: what the driver supports\n"
        'python -c "import torch; print(torch.version.cuda)"   # what torch needs',
        fix="update the NVIDIA driver on {host}, or install torch for an older CUDA\n"
        "sudo ubuntu-drivers install && sudo reboot   # Ubuntu",
    ),
    Rule(
        name="driver-library-mismatch",
        patterns=(
            r"Driver/library version mismatch",
            r"unsupported display driver / cuda driver combination",
            r"cudaErrorSystemDriverMismatch|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            r"forward compatibility was attempted on non supported HW",
            r"cudaErrorCompatNotSupportedOnDevice",
            r"NVML…version mismatch|LibRmVersionMismatch",
            r"Error 80[34]: ",
            r"kernel version [\d.]+ does not match DSO version",
        ),
        what="the NVIDIA kernel driver and its libraries on {host} have different versions",
        why="the driver was updated and the old one is still loaded; or a container has its own libraries "
        "(libcuda, compat) that do not match",
        confirm="cat /proc/driver/nvidia/version; ls /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.*",
        fix="sudo reboot\n"
        "without a reboot, if nothing uses the GPUs:\nsudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && "
        "nvidia-smi\n"
        "in a container: remove /usr/local/cuda/compat from LD_LIBRARY_PATH",
    ),
    Rule(
        name="fabric-manager",
        patterns=(
            r"system not yet initialized",
            r"cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY",
            r"Error 802\b",
            r"fabric ?manager[^\n]{0,60}(?:not running|fail|inactive|error)",
        ),
        what="the NVSwitch fabric of {host} is not initialized: its fabric manager is not running",
        confirm="systemctl status nvidia-fabricmanager\nnvidia-smi -q | grep -A 3 Fabric",
        fix="sudo systemctl enable --now nvidia-fabricmanager   # its version must match the driver",
    ),
    Rule(
        name="cuda-unknown-error",
        patterns=(
            r"CUDA unknown error",
            r"CUDA error: unknown error",
            r"(?:error|failure)[: (]*999\b",
            r"cudaErrorUnknown|CUDA_ERROR_UNKNOWN",
            r"cuda runtime error \(\d+\) ?: unknown error",
            r"unknown error - this may be due to an incorrectly set up environment",
        ),
        what="the driver of {host} cannot initialize CUDA, and reports no reason",
        why="typical after the host was suspended, when nvidia_uvm is not loaded, or when CUDA_VISIBLE_DEVICES was changed "
        "after CUDA was initialized",
        confirm="nvidia-smi; ls -l /dev/nvidia*; lsmod | grep nvidia_uvm",
        fix="sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm\n"
        "if that does not help:\nsudo reboot\n"
        "set CUDA_VISIBLE_DEVICES before Python starts, not in the script",
    ),
    Rule(
        name="cuda-unknown-error",
        patterns=(
            r"Unexpected error from cudaGetDeviceCount",
            r"CUDA driver initialization failed",
        ),
        unless=(
            r"Error (?:2|35|100|101|802|803|804): ",
            r"out of memory",
            r"No CUDA GPUs|no CUDA-capable",
        ),
        role=Role.SYMPTOM,
        what="the driver of {host} cannot enumerate its GPUs",
        confirm=f"ls -l /dev/nvidia*\n{_GPU_AND_TORCH}",
        fix="sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm\n"
        "if that does not help:\nsudo reboot   # a container: restart it with --gpus all",
    ),
    Rule(
        name="no-kernel-image",
        patterns=(
            r"no kernel image is available",
            r"not compatible with the current PyTorch installation",
            r"PyTorch no longer supports this GPU",
            r"cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU",
            r"(?:minimum|lowest) cuda capability supported",
            r"invalid device function",
            r"FlashAttention only supports (?:Ampere|Turing|Hopper)",
            r"device kernel image is invalid",
            r"sm_\d+ is not compatible",
        ),
        what="torch on {host}, or an extension, was not built for this GPU architecture",
        why="the GPU is newer than the build, or too old to be included",
        confirm='python -c "import torch; print(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())"',
        fix="install a torch build that supports this GPU: torch.cuda.get_arch_list() lists the supported architectures\n"
        "for a new GPU: the newest torch for the newest CUDA; for an old GPU: an older torch\n"
        "for an extension: rebuild it here with TORCH_CUDA_ARCH_LIST set to the compute capability, such as 8.6",
    ),
    Rule(
        name="invalid-device-ordinal",
        patterns=(
            r"invalid device ordinal",
            r"Invalid device id",
            r"deserialize object on CUDA device \d+ but torch\.cuda\.device_count\(\) is",
            r"cudaErrorInvalidDevice\b|CUDA_ERROR_INVALID_DEVICE",
            r"requested gpus?: \[[\d, ]+\][^\n]{0,10}\n? ?But your machine only has",
            r"device (?:id|index|ordinal)[^\n]{0,30}out of range",
            r"device >= 0 && device < num_gpus",
            r"device=\d+, num_gpus=\d+",
        ),
        what="the script uses a GPU index that this rank cannot see",
        why="indices start at 0 on every host and count only the GPUs given to the run (CUDA_VISIBLE_DEVICES): a "
        "global rank is not a GPU index, and there may be more ranks than GPUs",
        confirm='nvidia-smi -L; echo "$CUDA_VISIBLE_DEVICES"\n'
        'python -c "import torch; print(torch.cuda.device_count())"',
        fix=f"{_LOCAL_GPU}\nstart no more ranks than GPUs:\ntorchrun --nproc-per-node gpu …",
    ),
    Rule(
        name="gpu-busy",
        patterns=(
            r"busy or unavailable",
            r"cudaErrorDevicesUnavailable|cudaErrorDeviceUnavailable",
            r"exclusive[ _-](?:thread|process)[^\n]{0,60}in use",
        ),
        what="another process uses the GPU exclusively, or the driver cannot provide it",
        confirm="nvidia-smi --query-gpu=index,compute_mode --format=csv\nmuster gpus   # shows who uses it",
        fix="wait for the other process, or use another GPU: muster run --num-gpus 1 train.py\n"
        "allow processes to share it again:\nsudo nvidia-smi -c DEFAULT\n"
        "inspect the GPU: muster gpus and nvidia-smi -q on {host}; dmesg there shows Xid errors",
    ),
    Rule(
        name="container-no-gpu",
        patterns=(
            r"could not select device driver",
            r"nvidia-container-cli",
            r"nvidia-container-runtime[^\n]{0,80}(?:not found|no such|error)",
            r"(?:Unknown|invalid) (?:or invalid )?runtime (?:name|specified)[: ]+\"?nvidia",
            r"unknown or invalid runtime name: nvidia",
            r"Insufficient nvidia\.com/gpu",
            r"failed to inject CDI devices|unresolvable CDI devices",
            r"nvidia-container-(?:runtime-hook|toolkit)[^\n]{0,80}(?:not found|error|fail)",
            r"unknown flag: --gpus",
            r"Failed to initialize NVML: Unknown Error",
        ),
        unless=(r"Driver/library version mismatch", r"unsatisfied condition: cuda"),
        what="the container has no access to the GPUs of {host}",
        why="the NVIDIA container toolkit is not installed or not registered with Docker, or the host has no working "
        "driver; under Kubernetes: no node has enough free GPUs",
        confirm="nvidia-smi                          # on the host itself: does it work?\n"
        "docker info | grep -i runtimes      # is nvidia listed?\n"
        "kubectl describe nodes | grep -A 6 nvidia.com/gpu",
        fix="sudo apt-get install -y nvidia-container-toolkit\n"
        "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
    ),
    Rule(
        name="gpu-fell-off-bus",
        patterns=(
            r"fallen off the bus",
            r"GPU is lost",
            r"Xid \([^)\n]*\): ?79\b",
            r"Unable to determine the device handle",
            r"NVMLError_GpuIsLost",
            r"rm_init_adapter failed|RmInitAdapter failed",
            r"GPU requires reset",
        ),
        what="a GPU of {host} no longer answers",
        why="the cause is power, heat, the slot or riser, or the GPU itself",
        confirm="sudo dmesg | grep -i -E 'xid|nvrm'; nvidia-smi",
        fix="sudo reboot   # or power-cycle; if it happens again: reseat the GPU, check power and cooling, replace it\n"
        "until then exclude it: muster gpus shows the others",
    ),
    Rule(
        name="ecc-error",
        patterns=(
            r"uncorrectable ECC",
            r"cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE",
            r"Xid \([^)\n]*\): ?(?:48|63|64|94|95)\b",
            r"double[- ]bit ECC|DBE \(double bit error\)",
        ),
        what="the GPU has a hardware fault: an uncorrectable memory error",
        confirm="nvidia-smi -q -d ECC,ROW_REMAPPER; sudo dmesg | grep -i xid",
        fix="sudo nvidia-smi --gpu-reset -i INDEX   # with no process running on it; or reboot\n"
        "inspect the GPU: muster gpus and nvidia-smi -q on {host}; if it happens again, have the GPU replaced",
    ),
)
