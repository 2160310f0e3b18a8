"""Shared libraries that are missing or incompatible."""

from torchmuster.known_errors.rule import Rule

RULES = (
    Rule(
        name="shared-library-missing",
        patterns=(
            r"(?P<library>lib[\w.+-]+\.so[\w.]*): cannot open shared object file",
            r"cannot open shared object file",
            r"Could not load library (?P<library>lib[\w.+-]+)",
            r"Unable to load any of \{(?P<library>lib[\w.+-]+)",
            r"Could not load dynamic library '(?P<library>lib[\w.+-]+)'",
            r"WinError 126|WinError 1114|WinError 193",
            r"DLL load failed",
            r"Library not loaded: (?P<library>[\w./@+-]+)",
            r"(?P<library>lib[\w.+-]+\.so[\w.]*)'? not found",
            r"Could not locate (?P<library>[\w.-]+\.dll)",
            r"(?:unable|failed) to (?:load|find|open|dlopen)[^\n]{0,60}(?P<library>lib[\w.+-]+\.so)",
            r"specified module could not be found",
            r"cannot find -l(?:cuda|cudart|cublas|cudnn|nccl)",
        ),
        unless=(
            r"undefined symbol",
            r"nvidia-container-cli",
            r"GLIBC(?:XX)?_",
            r"specified procedure",
        ),
        what="a library that torch or an extension needs was not found on {host}: {library}",
        why="its package is not installed there, has another version, or the search path is wrong. libcuda.so.1 is "
        "part of the driver; on Windows the Visual C++ runtime is often missing",
        confirm="ldconfig -p | grep {library}; python -m pip list | grep -i nvidia\n"
        'echo "$LD_LIBRARY_PATH"',
        fix="python -m pip install --force-reinstall torch   # includes libcudart, libcublas, libcudnn, libnccl\n"
        "for libGL:\nsudo apt-get install -y libgl1 libglib2.0-0\nfor libcuda: install the driver\n"
        "on Windows: install the Microsoft Visual C++ Redistributable (x64)",
    ),
    Rule(
        name="symbol-mismatch",
        patterns=(
            r"undefined symbol: (?!nccl)(?P<symbol>\w+)",
            r"symbol not found in flat namespace|Symbol not found: ",
            r"WinError 127|specified procedure could not be found",
            r"symbol lookup error",
            r"symbol \w+[^\n]{0,20}version [\w.]+ not defined in file",
            r"undefined reference to",
            r"procedure entry point[^\n]{0,100}could not be located",
        ),
        unless=(r"undefined symbol: nccl", r"GLIBC(?:XX)?_[\d.]+' not found"),
        what="incompatible libraries on {host}: a symbol is missing ({symbol})",
        why="an extension was built for another torch (or with another C++ ABI), or LD_LIBRARY_PATH loads another CUDA "
        "library instead of the one shipped with torch",
        confirm='echo "$LD_LIBRARY_PATH"; python -m pip list | grep -i -E "torch|nvidia|flash|deepspeed"\n'
        "c++filt {symbol}   # the readable name",
        fix="unset LD_LIBRARY_PATH\n"
        "rebuild the extension for the installed torch:\npython -m pip install --no-build-isolation "
        "--no-cache-dir --force-reinstall PACKAGE\n"
        "for iJIT_NotifyEvent:\nconda install mkl=2024.0",
    ),
    Rule(
        name="glibcxx-missing",
        patterns=(
            r"version [`']?(?P<version>(?:GLIBCXX|CXXABI|GLIBC)_[\d.]+)'? not found",
            r"(?P<version>(?:GLIBCXX|CXXABI|GLIBC)_[\d.]+)'? not found",
        ),
        what="a library was built for a newer system than {host}: {version} is missing",
        why="GLIBCXX is part of libstdc++, and conda often has a newer libstdc++ than the system. GLIBC is part of "
        "the system: only a newer system or an older build of the package helps",
        confirm="strings /usr/lib/x86_64-linux-gnu/libstdc++.so.6 | grep GLIBCXX | tail -1; ldd --version | head -1",
        fix="for GLIBCXX:\nconda install -c conda-forge libstdcxx-ng\n"
        "export LD_LIBRARY_PATH=$CONDA_PREFIX/lib:$LD_LIBRARY_PATH\n"
        "for GLIBC: use a container with a newer system, or install an older build of the package",
    ),
)
