"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="communication",
    title="Set-up and communication",
    exercises=(
        Exercise(name="get_device_info", title="list the devices", points=4, ranks=1),
        Exercise(name="get_local_rank", title="the rank on this machine", points=3, ranks=1),
        Exercise(name="setup_distributed", title="join the group", points=6, joined=False),
        Exercise(name="verify_gpu_communication", title="verify communication", points=4),
        Exercise(name="cleanup_distributed", title="leave the group", points=3),
    ),
    words={
        "first-device-only": Word(
            "not every GPU is among the devices",
            "a choice by memory or name needs all of them",
            "[torch.cuda.get_device_properties(place) for place in range(count)]",
        ),
        "no-gpu-crashes": Word(
            "it fails on a machine without a GPU",
            "most torch.cuda functions raise there, and development often happens on such machines",
            "check torch.cuda.is_available() first; without a GPU return 0 and an empty list",
        ),
        "rank-for-local-rank": Word(
            "it returns the global rank, not the local one",
            "the second machine's first process has rank 8 and GPU 0: there is no GPU 8",
            'read os.environ["LOCAL_RANK"], not RANK',
        ),
        "local-rank-is-text": Word(
            "it returns a string, not a number",
            'environment variables are strings: "1" is not a device, and "10" sorts before "2"',
            'int(os.environ.get("LOCAL_RANK", "0"))',
        ),
        "local-rank-without-launcher": Word(
            "it fails when no launcher has set LOCAL_RANK",
            "the same script without a launcher should run as a single rank",
            'os.environ.get("LOCAL_RANK", "0")',
        ),
        "device-after-group": Word(
            "the device is set after the group is created",
            "NCCL then uses the default device: every rank opens a context on GPU 0",
            "torch.cuda.set_device(get_local_rank()) before init_process_group",
        ),
        "no-set-device": Word(
            "the rank's own GPU is never set as current device",
            "all ranks of a machine then compute on GPU 0, and NCCL refuses or hangs",
            "torch.cuda.set_device(get_local_rank()), before init_process_group",
        ),
        "address-overwritten": Word(
            "the rendezvous address is overwritten",
            "the launcher has set MASTER_ADDR and MASTER_PORT; with other values the ranks cannot "
            "connect",
            "do not change them, or use os.environ.setdefault",
        ),
        "nccl-on-cpu": Word(
            "it uses nccl without a GPU",
            "NCCL works only between GPUs",
            'backend = "gloo" unless torch.cuda.is_available()',
        ),
        "everyone-is-rank-0": Word(
            "a rank joins with a wrong rank number",
            "the group waits for missing ranks until its timeout, which takes minutes",
            "init_process_group(backend, rank=rank, world_size=world_size)",
        ),
        "value-not-checked": Word(
            "it returns True although nothing was received",
            "broken links between GPUs return zeros without any error; only the value shows it",
            "compare the sum with world_size * (world_size + 1) / 2",
        ),
        "collective-on-one-rank": Word(
            "not every rank takes part in the all-reduce",
            "a collective completes when all ranks have called it: the others wait forever",
            "call dist.all_reduce on every rank, without `if rank == 0`",
        ),
        "still-in-the-group": Word(
            "the group still exists",
            "its threads and sockets stay alive, and a second group cannot be created",
            "dist.destroy_process_group()",
        ),
        "cleanup-twice": Word(
            "the second call fails",
            "clean-up is called in `finally`, where the set-up may be incomplete",
            "if dist.is_initialized(): dist.destroy_process_group()",
        ),
    },
    questions=(
        "How long does the smallest message take? How many of them fit into a training step of 10 ms?",
        "From which size on does the time grow with the size? What does that mean for many small "
        "tensors?",
        "What rate do the largest messages reach, and how long would a model of 1 GB take?",
    ),
    on_gpus="The same functions run on NCCL. Expect a few tens of microseconds for the smallest message and, "
    "over NVLink, hundreds of GB/s for the largest; compare with muster bench collectives.",
)
