"""Compiling block by block."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


# In a process of its own: torch's compiler warns, starts threads and changes the environment.
PROGRAM = """
import json, torch
from torch import nn
import torch._inductor.config as inductor
from torch._dynamo.utils import counters
from torchmuster.train.models.blocks import compile_blocks
from torchmuster.train.models.blocks import recompute_blocks

torch.manual_seed(0)
x = torch.randn(3, 4)
told = {}

# More blocks than torch compiles variants of one function; making code for them would take long.
model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(10)))
names = list(model.state_dict())
model(x).sum().backward()
expected = [one.grad.clone() for one in model.parameters()]
model.zero_grad()
recompute_blocks(model, "full")
compiled = nn.Module.compile
nn.Module.compile = lambda module: compiled(module, backend="aot_eager")
told["blocks"] = compile_blocks(model)
nn.Module.compile = compiled
model(x).sum().backward()
told["graphs"] = counters["stats"]["unique_graphs"]
told["names"] = list(model.state_dict()) == names
told["gradients"] = all(
    torch.allclose(one.grad, gradient, atol=1e-6)
    for one, gradient in zip(model.parameters(), expected)
)

inductor.cpp.simdlen, inductor.cpp_cache_precompile_headers = 0, False  # quicker to make
whole = nn.Tanh()  # the least there is to make code for
with torch.no_grad():
    expected = whole(x)
    told["whole"] = compile_blocks(whole)
    told["same"] = torch.allclose(whole(x), expected, atol=1e-6)
print(json.dumps(told))
"""


@pytest.mark.nightly
def test_blocks_share_what_is_compiled_and_give_the_same_gradients(tmp_path: Path) -> None:
    cache = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **cache},
    )
    told = json.loads(done.stdout)
    assert (told.pop("blocks"), told.pop("whole")) == (10, 1)
    # One of the graphs is for the first block, whose input needs no gradient.
    assert told == {"graphs": 2, "names": True, "gradients": True, "same": True}
    assert list(tmp_path.rglob("*.so"))  # a compiler was at work
