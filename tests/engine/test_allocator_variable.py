"""The variable that ``muster train`` sets for torch's allocator on GPUs."""

from pathlib import Path

import pytest
import torch

from torchmuster.cli.train import ALLOCATOR_SETTING

pytestmark = pytest.mark.engine


def test_cudas_allocator_reads_it() -> None:
    # torch 2.9 reads PYTORCH_CUDA_ALLOC_CONF alone (pytorch#183387), which later versions only keep for older scripts.
    # Without a GPU nobody can be asked, but every build comes with the header that reads it.
    header = Path(torch.__file__).parent / "include" / "c10" / "cuda" / "CUDAAllocatorConfig.h"
    variable, _ = ALLOCATOR_SETTING
    assert f'get_env("{variable}")' in header.read_text()
