"""Packages that are missing, incompatible or built for another processor."""

from torchmuster.known_errors.rule import Role, Rule

RULES = (
    Rule(
        name="numpy-abi",
        patterns=(
            r"compiled using NumPy 1\.x cannot be run",
            r"numpy\.(?:dtype|ufunc|ndarray) size changed",
            r"_ARRAY_API not found",
            r"numpy\.core\.multiarray failed to import",
            r"numpy is not available",
            r"module compiled against (?:API|ABI) version",
            r"numpy\.core\._multiarray_umath failed",
        ),
        what="a package was built for a NumPy version other than the one installed on {host}",
        confirm='python -c "import numpy, torch; print(numpy.__version__, torch.__version__); '
        'torch.zeros(1).numpy()"',
        fix='python -m pip install "numpy<2"  # or a newer version of the package that reports the error',
    ),
    Rule(
        name="module-missing",
        patterns=(
            r"No module named ['\"]?(?P<module>\w+)(?![\w.])['\"]?",  # runpy leaves out the quotes
        ),
        unless=(r"torch\._C\._distributed_c10d",),
        what="{module} is not installed in this rank's Python environment on {host}",
        why="torchrun and ssh may start a different Python than your shell",
        confirm='python -c "import sys; print(sys.executable)"; python -m pip show {module}',
        fix="python -m pip install {module}  # on {host}; the package name can differ from the module name",
    ),
    Rule(
        name="module-missing",
        patterns=(r"No module named ['\"]?(?P<package>\w+)\.(?P<part>[\w.]+\w)",),
        unless=(r"torch\._C\._distributed_c10d",),
        what="{package} on {host} has no submodule {part}: it is not installed, or the version differs",
        why="modules move between versions; or a file of yours with the same name hides the package",
        confirm='python -m pip show {package}; python -c "import {package}; print({package}.__file__)"',
        fix="python -m pip install --upgrade {package}\n"
        "or update the package that imports {package}.{part}: the traceback names it",
    ),
    Rule(
        name="libuv-missing",
        patterns=(
            r"use_libuv was requested but PyTorch was buil[dt] without libuv",
            r"PyTorch was buil[dt] without libuv support",
        ),
        what="this build of torch has no libuv, which its store uses by default",
        why="builds for Windows have no libuv",
        confirm='python -c "import torch, sys; print(torch.__version__, sys.platform)"',
        fix="set USE_LIBUV=0 in the environment of the run\n"
        "set USE_LIBUV=0            (cmd)\n"
        "$env:USE_LIBUV = '0'       (PowerShell)\n"
        'or in the script: init_method="tcp://HOST:PORT?use_libuv=0"',
    ),
    Rule(
        name="cuda-toolkit-mismatch",
        patterns=(
            r"detected CUDA version[^\n]{0,40}mismatches the version that was used to compile",
            r"CUDA_HOME (?:environment variable )?is not set|CUDA_HOME does not exist",
            r"Installed CUDA version [\d.]+ does not match the version torch was compiled with",
            r"CUDAMismatchException|MissingCUDAException",
            r"nvcc fatal ?: Unsupported gpu architecture",
            r"unsupported GNU version!",
            r"Cannot find CUDA_HOME|nvcc(?:'|\")?: No such file|nvcc: (?:command )?not found",
            r"No such file or directory: '[\w/.:-]*nvcc'",
            r"bare_metal_version|nvcc was not found",
            r"compiled with a version of Cuda that does not match",
            r"CUDA version mismatch",
        ),
        what="the CUDA toolkit on {host} does not match torch, or is not found, so an extension cannot be built",
        why="extensions are compiled with nvcc, whose version must match torch's CUDA (at least the major version)",
        confirm='nvcc --version; echo "$CUDA_HOME"\npython -c "import torch; print(torch.version.cuda)"',
        fix="use the toolkit that matches torch:\nexport CUDA_HOME=/usr/local/cuda-12.4 "
        "PATH=/usr/local/cuda-12.4/bin:$PATH\n"
        "or install it:\nconda install -c nvidia cuda-toolkit=12.4\n"
        "for DeepSpeed, only if you know that the versions are compatible:\nexport DS_SKIP_CUDA_CHECK=1",
    ),
    Rule(
        name="package-version-mismatch",
        patterns=(
            r"operator torchvision::\w+ does not exist",
            r"Could not run 'torchvision::\w+'",
            r"PyTorch and torchvision were compiled with different CUDA",
            r"torchaudio[^\n]{0,60}compiled with different CUDA|different CUDA versions",
            r"cannot import name '\w+' from (?:partially initialized module )?'[\w.]+'",
            r"AttributeError: (?:partially initialized )?module '(?:torch|numpy|transformers|"
            r"accelerate|deepspeed|pytorch_lightning|lightning|triton|bitsandbytes|peft|datasets)[\w.]*' "
            r"has no attribute '\w+'",
            r"(?:is|are) required for a normal functioning of this module,? but found",
            r"requires [`'\"]?accelerate ?[>=]",
            r"Using[^\n]{0,40}requires[^\n]{0,40}(?:>=|==) ?[\d.]+",
            r"has requirement [\w.=<>! -]+, but you(?:'ll)? have",
            r"but you have [\w-]+ [\d.+\w]+ which is incompatible",
            r"VersionConflict|ContextualVersionConflict",
            r"torch\.ops[^\n]{0,40}has no attribute",
            r"No such operator torchvision",
            r"Couldn't load custom C\+\+ ops",
            r"was removed in the NumPy 2\.0 release",
        ),
        unless=(r"numpy\.core\.multiarray", r"'torch\._C' has no attribute '_cuda_"),
        what="packages on {host} have incompatible versions",
        why="torchvision, torchaudio and extensions are each built for exactly one torch version; names move between "
        "versions",
        confirm="python -m pip check\npython -m pip list | grep -i -E 'torch|transformers|accelerate|numpy|triton'",
        fix="install them together in one command, so that pip chooses compatible versions:\n"
        "python -m pip install --upgrade torch torchvision torchaudio\n"
        "and make sure that no file of yours has the name of a package",
    ),
    Rule(
        name="illegal-instruction",
        patterns=(
            r"Illegal instruction",
            r"\bSIGILL\b",
            r"exit ?code ?:? ?-4\b|Signal 4 \(",
        ),
        unless=(r"an illegal instruction was encountered",),
        role=Role.SYMPTOM,
        what="a library was built for a newer processor than {host} has",
        confirm="lscpu | grep -o -w -E 'avx|avx2|avx512f' | sort -u\n"
        'python -X faulthandler -c "import torch"   # names the import that crashes',
        fix="install builds for this processor on {host}: from your distribution, from conda, or built from source",
    ),
    Rule(
        name="segfault",
        patterns=(
            r"Segmentation fault",
            r"\bSIGSEGV\b",
            r"exit ?code ?:? ?-11\b|Signal 11\b|signal: 11\b|return code ?=? ?-11\b",
            r"exited on signal 11",
            r"exit(?:ed)? (?:with )?(?:code|status):? 139\b",
            r"0xC0000005|-1073741819|access violation",
        ),
        unless=(r"Bus error", r"could be caused by a segmentation fault"),
        role=Role.SYMPTOM,
        what="native code accessed invalid memory: a broken or mismatched extension",
        confirm="python -X faulthandler train.py   # prints the Python line\n"
        "gdb -batch -ex run -ex bt --args python train.py",
        fix="the stack trace in the log names the library; reinstall it for this torch and Python\n"
        "if it is in NCCL or CUDA: use the same torch, driver and NCCL on every host",
    ),
)
