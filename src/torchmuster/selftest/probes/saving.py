"""Saves beside a training, the report of an out-of-memory error, and adapters, on the ranks of a check."""

import copy
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.checkpoints.places import open_store
from torchmuster.devices import snapshot
from torchmuster.errors import OutOfMemory
from torchmuster.selftest.probes.answering import Request, answer_request
from torchmuster.selftest.probes.training_data import SMALL_GPT
from torchmuster.train import seeds
from torchmuster.train.checkpointing.checkpointer import Checkpointer, Mode
from torchmuster.train.models import factory
from torchmuster.train.out_of_memory import oom_report
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.fsdp import Fsdp
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World

_WIDTH = 1024
_BLOCKS = {"cpu": 4, "gpu": 24}  # 50 MB and 300 MB of state
_SAVES = 3
_STEPS_BESIDE = 4
_LIMIT_BYTES = 2**30
_COLUMNS = 2048


def save_stall(world: World, request: Request) -> dict[str, Any]:
    """Save synchronously and beside the training, in turn; load what was saved and compare it."""
    found: dict[str, Any] = {}
    for name, strategy in (("ddp", Ddp(world)), ("fsdp", Fsdp(world))):
        found[name] = _saves(world, request, name, strategy)
    found["gpus_of_this_rank"] = _gpus_of_this_rank()
    return found


def _saves(world: World, request: Request, name: str, strategy: Strategy) -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_BLOCKS[request["device"]])]
    model = strategy.prepare(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(64, _WIDTH, device=world.device)
    folder = Path(request["folder"])
    kind: Mode = "sync" if request["planted"] else "async"
    sync = Checkpointer(
        open_store(folder / f"{name}-sync"), world, strategy=name, keep=1, mode="sync"
    )
    beside = Checkpointer(
        open_store(folder / f"{name}-beside"), world, strategy=name, keep=1, mode=kind
    )
    times: dict[str, list[float]] = {"sync_s": [], "stall_s": []}
    same, size_bytes = True, 0
    for number in range(_SAVES + 1):
        for saver, key in ((sync, "sync_s"), (beside, "stall_s")):
            _step(model, optimizer, inputs, saver)
            state = _state_of(strategy, model, optimizer, number)
            kept = copy.deepcopy(state["model"])
            saver.save(state, step=number, own=seeds.save_random_states(world))
            for _ in range(_STEPS_BESIDE):
                _step(model, optimizer, inputs, saver)
            report = saver.wait()
            assert report is not None
            if report.problem:
                return {"problem": report.problem}
            if number:  # the first save of each takes its memory
                times[key].append(report.stall_s)
            size_bytes = report.size_bytes
            same = same and _is_saved(saver, strategy, model, optimizer, kept)
    sync.close()
    beside.close()
    return {key: statistics.median(taken) for key, taken in times.items()} | {
        "same": same,
        "size_bytes": size_bytes,
    }


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    saver: Checkpointer,
) -> None:
    model(inputs).square().mean().backward()
    saver.before_update()
    optimizer.step()
    optimizer.zero_grad()


def _state_of(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> dict[str, Any]:
    return {**strategy.state_dict(model, optimizer), "progress": {"step": step}}


def _is_saved(
    saver: Checkpointer,
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    kept: dict[str, torch.Tensor],
) -> bool:
    """Return whether the newest checkpoint has exactly the weights of the moment of its save."""
    state = copy.deepcopy(_state_of(strategy, model, optimizer, 0))
    loaded = saver.load(state)
    if loaded is None:
        return False
    found = loaded.state["model"]
    return found.keys() == kept.keys() and all(
        torch.equal(_local(found[name]), _local(kept[name])) for name in kept
    )


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _gpus_of_this_rank() -> int | None:
    """Return on how many GPUs the driver sees this process; None if it shows no pids of ours, as in a container."""
    seen = sum(
        os.getpid() in {process.pid for process in device.processes}
        for device in snapshot.take_snapshot().accelerators
    )
    return seen or None


def out_of_memory(world: World, request: Request) -> dict[str, Any]:
    """Request more memory than there is, in a forward, and return the report."""
    torch.manual_seed(0)
    model = factory.call_import(SMALL_GPT, "model.build").to(world.device)
    optimizer = torch.optim.AdamW(model.parameters())
    if world.device.type == "cuda":
        total = torch.cuda.get_device_properties(world.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, _LIMIT_BYTES / total), world.device)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=world.device)
    huge = 2**45 // _COLUMNS
    facts: dict[str, Any] = {
        "rank": world.global_rank,
        "parameters_bytes": sum(one.nbytes for one in model.parameters()),
        "what": "",
        "why": "",
        "fix": "",
    }
    try:
        with oom_report(world, model, optimizer, micro_batch_size=huge):
            if request["planted"]:
                raise RuntimeError("another error")
            model(tokens).new_empty(huge, _COLUMNS)
    except OutOfMemory as error:
        facts |= {"what": error.what, "why": error.why, "fix": error.fix}
    except RuntimeError as error:
        facts["what"] = f"not reported: {error}"
    return facts


def lora(world: World, request: Request) -> dict[str, Any]:
    """Train adapters of a tiny Llama, with its base in full precision and in 4 bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from torchmuster.plan.job import Candidate, Work
    from torchmuster.plan.probes.build_step import build_step
    from torchmuster.train.strategies.sharding import ShardLayout

    folder = Path(request["folder"]) / "llama"
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    found: dict[str, Any] = {}
    for name in ("lora", "qlora"):
        if name == "qlora" and not request["four_bit"]:
            continue
        work = Work(
            model_name_or_path=str(folder),
            lora_rank=8,
            load_in_4bit=name == "qlora",
            sequence_length=32,
        )
        single = Candidate(
            strategy="single", layout=ShardLayout(copies=1, shards=1), micro_batch_size=4
        )
        built = build_step(work, single, world)
        base = {key: one for key, one in built.model.named_parameters() if not one.requires_grad}
        before = {key: one.detach().clone() for key, one in base.items()}
        torch.manual_seed(1)
        batch = built.batch()
        losses = []
        for _ in range(10):
            loss, count = built.loss_of(batch)
            mean = loss if count is None else loss / count
            mean.backward()  # type: ignore[no-untyped-call]
            built.optimizer.step()
            built.optimizer.zero_grad()
            losses.append(float(mean))
        if request["planted"]:
            with torch.no_grad():
                next(iter(base.values())).view(torch.uint8).bitwise_xor_(1)
        found[name] = {
            "losses": losses,
            "base_same": all(torch.equal(one, before[key]) for key, one in base.items()),
            "base_bytes": sum(one.nbytes for one in base.values()),
            "trained": built.trained_count,
        }
    return found


def main() -> None:
    """Answer a request."""
    answer_request({"save-stall": save_stall, "out-of-memory": out_of_memory, "lora": lora})


if __name__ == "__main__":
    main()
