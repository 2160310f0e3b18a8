"""Restarting a run again and again by killing its ranks, and seeing that it comes up every time."""

#: Ends well in the round whose number it is given; in all others it goes on until it is killed.
ROUNDS = """
import os, sys, time, torch, torch.distributed as dist
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
print(f"round {number} came up", flush=True)
while number < int(sys.argv[1]):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
dist.destroy_process_group()
"""
