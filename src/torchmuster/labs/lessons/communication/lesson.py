"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="communication",
    title="Set-up and communication",
    exercises=(
        Exercise(name="get_device_info", title="what is here", points=4, ranks=1),
        Exercise(name="get_local_rank", title="which place on this machine", points=3, ranks=1),
        Exercise(name="setup_distributed", title="join the group", points=6, joined=False),
        Exercise(name="verify_gpu_communication", title="prove that it works", points=4),
        Exercise(name="cleanup_distributed", title="leave the group", points=3),
    ),
    words={
        "first-device-only": Word(
            "not every GPU is among the devices",
            "whoever chooses by memory or name must see all of them",
            "[torch.cuda.get_device_properties(place) for place in range(count)]",
        ),
        "no-gpu-crashes": Word(
            "it fails on a machine without a GPU",
            "most functions of torch.cuda raise there, and such machines are where one develops",
            "ask torch.cuda.is_available() first; without one, 0 and an empty list",
        ),
        "rank-for-local-rank": Word(
            "it is the rank among all machines",
            "the second machine's first process has rank 8 and GPU 0: there is no GPU 8",
            'read os.environ["LOCAL_RANK"], not RANK',
        ),
        "local-rank-is-text": Word(
            "it is a text, not a number",
            'environment variables are texts: "1" is no device, and "10" comes before "2"',
            'int(os.environ.get("LOCAL_RANK", "0"))',
        ),
        "local-rank-without-launcher": Word(
            "it fails when no launcher has set LOCAL_RANK",
            "the same script, started by itself, should run as the only rank",
            'os.environ.get("LOCAL_RANK", "0")',
        ),
        "device-after-group": Word(
            "the device is chosen after the group is formed",
            "NCCL has taken the current device by then: every rank opens a context on GPU 0",
            "torch.cuda.set_device(get_local_rank()) before init_process_group",
        ),
        "no-set-device": Word(
            "the rank's own GPU is never made the current one",
            "all ranks of a machine then compute on GPU 0, and NCCL refuses or hangs",
            "torch.cuda.set_device(get_local_rank()), before init_process_group",
        ),
        "address-overwritten": Word(
            "the meeting place is overwritten",
            "the launcher has set MASTER_ADDR and MASTER_PORT; with others the ranks never meet",
            "leave both alone, or use os.environ.setdefault",
        ),
        "nccl-on-cpu": Word(
            "it asks for nccl where there is no GPU",
            "NCCL sends between GPUs only",
            'backend = "gloo" unless torch.cuda.is_available()',
        ),
        "everyone-is-rank-0": Word(
            "a rank joins under a number that is not its own",
            "the group waits for ranks that never come, until its timeout of minutes",
            "init_process_group(backend, rank=rank, world_size=world_size)",
        ),
        "value-not-checked": Word(
            "it says True although nothing arrived",
            "broken links between GPUs return zeros without any error; only the value shows it",
            "compare the sum with world_size * (world_size + 1) / 2",
        ),
        "collective-on-one-rank": Word(
            "not every rank takes part in the all-reduce",
            "a collective ends when all ranks have called it: the others wait for ever",
            "call dist.all_reduce on every rank, without `if rank == 0`",
        ),
        "still-in-the-group": Word(
            "the group is still there",
            "its threads and sockets live on, and a second group cannot be formed",
            "dist.destroy_process_group()",
        ),
        "cleanup-twice": Word(
            "the second call fails",
            "clean-up stands in `finally`, where nobody knows how far the set-up came",
            "if dist.is_initialized(): dist.destroy_process_group()",
        ),
    },
    questions=(
        "How long does the smallest message take? How many of them fit into a training step of 10 ms?",
        "From which size on does the time grow with the size? What does that say about many small "
        "tensors?",
        "Which rate do the largest messages reach, and what would a model of 1 GB take at it?",
    ),
    on_gpus="The same functions run on NCCL. Expect a few tens of microseconds for the smallest message and, "
    "over NVLink, hundreds of GB/s for the largest; what a machine should reach is what muster bench "
    "collectives compares with.",
    measured_on=2,
    measured_joined=False,
)
