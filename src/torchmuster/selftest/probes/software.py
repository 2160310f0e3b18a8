"""Prints the versions of torch and of the libraries that the checks use, and what torch sees of the GPUs, as JSON."""

import importlib.metadata
import json
import platform

_LIBRARIES = ("torch", "triton", "transformers", "accelerate", "peft", "bitsandbytes", "trl")


def main() -> None:
    """Print one line of JSON."""
    import torch

    found: dict[str, object] = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if torch.version.cuda and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    build = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    found |= {name: version for name, version in build.items() if version}
    print(json.dumps({"versions": found, "devices": devices}))


if __name__ == "__main__":
    main()
