"""Errors in how a script uses torch.distributed and processes."""

from torchmuster.known_errors.rule import Rule

RULES = (
    Rule(
        name="unused-parameters",
        patterns=(
            r"Expected to have finished reduction in the prior iteration",
            r"parameters that were not used in producing the loss",
            r"Parameter indices which did not receive grad",
        ),
        what="some parameters do not contribute to the loss, and DDP waits for their gradients",
        confirm="TORCH_DISTRIBUTED_DEBUG=DETAIL muster run train.py   # names the parameters",
        fix="DistributedDataParallel(model, find_unused_parameters=True), or use every parameter",
    ),
    Rule(
        name="parameter-marked-ready-twice",
        patterns=(
            r"Expected to mark a variable ready only once",
            r"has been marked as ready twice",
        ),
        what="DDP received a parameter's gradient twice in one backward pass",
        why="the parameter is used in several forward passes before one backward, or activation checkpointing runs the same layer again",
        confirm="TORCH_DISTRIBUTED_DEBUG=DETAIL muster run train.py   # names the parameter",
        fix="checkpoint(…, use_reentrant=False), without find_unused_parameters\n"
        "or, if the graph is the same in every step: DistributedDataParallel(model, static_graph=True)",
    ),
    Rule(
        name="collective-mismatch",
        patterns=(
            r"Is there a distributed collective mismatch",
            r"Mismatch between collective",
            r"Detected mismatch between collectives",
            r"op\.preamble\.length <= op\.nbytes",
            r"verify(?:ing)? (?:model )?param(?:eter)?s? across processes",
            r"DDP expects same model across all ranks",
            r"appears not to match (?:sizes|strides) of the same param in process",
            r"has inconsistent \d+ params",
            r"Collectives? (?:with )?(?:differ|mismatch)",
            r"Mismatched collective",
        ),
        what="ranks called different collectives, or the same one with tensors of different sizes",
        why="only some ranks take a branch, batches have different lengths, or the models differ between ranks",
        confirm="TORCH_DISTRIBUTED_DEBUG=DETAIL muster run train.py   # names the rank and the operation",
        fix="run it once with TORCH_DISTRIBUTED_DEBUG=DETAIL: it names the rank and the operation\n"
        "then make all ranks call the same collective: none inside `if rank == 0`, the same model everywhere",
    ),
    Rule(
        name="no-process-group",
        patterns=(
            r"Default process group has not been initialized",
            r"Default process group is not initialized",
            r"Process group (?:is )?not initiali[sz]ed",
            r"DeviceMesh process groups not initialized",
            r"parallel group is not initialized",
            r"torch\.distributed (?:is |has )?(?:not |n't )(?:been |yet )?initialized",
        ),
        what="a collective was called before the process group was initialized",
        why="the script was started with python instead of a launcher, or part of it runs before the group is created or after it is destroyed",
        confirm="python -c 'import os; print(os.environ.get(\"RANK\"))'   # in the script: is it set?",
        fix="call torch.distributed.init_process_group() first\nmuster run train.py   # or torchrun, not python",
    ),
    Rule(
        name="process-group-twice",
        patterns=(r"trying to initialize the default process group twice",),
        what="init_process_group was called a second time in one process",
        why="a library (accelerate, Lightning, DeepSpeed) calls it too, or a notebook cell ran twice",
        confirm="grep -rn init_process_group *.py",
        fix="if not torch.distributed.is_initialized(): torch.distributed.init_process_group()",
    ),
    Rule(
        name="env-variable-missing",
        patterns=(
            r"environment variable (?P<variable>\w+) expected, but not set",
            r"KeyError: '(?P<variable>(?:LOCAL_|NODE_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)|"
            r"SLURM_\w+|OMPI_\w+|PMI_\w+)'",
            r"(?P<variable>MASTER_ADDR|MASTER_PORT|LOCAL_RANK|WORLD_SIZE|RANK)[^\n]{0,30} (?:is )?not set",
            r"(?P<variable>MASTER_ADDR|MASTER_PORT|LOCAL_RANK|WORLD_SIZE)[^\n]{0,30}(?:must|needs? to|should|has to) be (?:set|defined|provided)",
        ),
        what="{variable} is not set: the script was started without a launcher",
        why="torchrun and muster run set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank",
        confirm="env | grep -E 'RANK|WORLD_SIZE|MASTER_'",
        fix="muster run train.py\ntorchrun --standalone --nproc-per-node 1 train.py   # with torchrun",
    ),
    Rule(
        name="world-size-mismatch",
        patterns=(
            r"Invalid rank \d+,",
            r"rank should be in the interval \[0",
            r"number of (?:nodes|tasks)[^\n]{0,40} configured in SLURM",
            r"does not match the number of (?:nodes|tasks|devices)",
            r"--ntasks-per-node=\d+`? does not match",
            r"Mesh should not be bigger than default world size",
            r"(?:train_batch_size|Check batch related parameters)[^\n]{0,60}(?:is )?not equal",
            r"world[_ ]size ?\(?\d+\)? (?:is )?not divisible by",
            r"world[_ ]size[^\n]{0,40}(?:does not match|mismatch|!=)",
            r"No slot '?\d+'? specified on host",
            r"rank \d+ (?:is )?(?:not (?:less than|in)|>=|out of) [^\n]{0,20}world[_ ]size",
            r"nnodes=\d+ is not in",
            r"the number of (?:processes|ranks)[^\n]{0,60}(?:does not match|must (?:be|match))",
            r"Inconsistent (?:world size|nnodes)",
            r"requested \d+ (?:GPUs|devices)[^\n]{0,20} but launched \d+",
            r"You set [`']?--ntasks=\d+",
            r"rank[^\n]{0,30}(?:must be|should be) (?:less|smaller|lower|in (?:the )?range)[^\n]{0,40}",
            r"(?:processes|ranks|world[_ ]size|nproc\w*)[^\n]{0,40}(?:more|larger|greater|exceeds?)[^\n]{0,40}(?:available|visible|number of) (?:GPUs|devices)",
            r"exceeds the (?:total )?number of (?:available )?(?:GPUs|devices)",
            r"divisible by (?:the )?(?:world|tensor[- _](?:model )?parallel|pipeline|data[- _]parallel|number of (?:GPUs|processes))",
            r"not enough slots available in the system",
        ),
        what="the number of ranks, the world size and the number of hosts do not match",
        why="the launcher's counts, the script's settings and the scheduler's tasks must give the same number of ranks",
        confirm="env | grep -E 'RANK|WORLD_SIZE|SLURM_N'   # in every process",
        fix="read RANK and WORLD_SIZE from the environment; do not hard-code them in the script\n"
        "Slurm with Lightning: sbatch --nodes=N --ntasks-per-node=GPUS, and Trainer(num_nodes=N, devices=GPUS)\n"
        "Slurm with torchrun: --ntasks-per-node=1, and torchrun --nproc-per-node=GPUS",
    ),
    Rule(
        name="local-rank-argument",
        patterns=(
            r"unrecognized arguments:[^\n]{0,200}--local[-_]rank",
            r"arguments? (?:are |is )?required: [^\n]{0,100}--local[-_]rank",
            r"no such option: --local[-_]rank",
        ),
        what="the script expects its local rank as an argument, which the launcher does not pass or spells differently",
        why="torch.distributed.launch passes --local-rank (before torch 2.0: --local_rank); torchrun passes none",
        confirm="grep -n 'local.rank' train.py",
        fix='read it from the environment: int(os.environ["LOCAL_RANK"])\n'
        'or accept both: parser.add_argument("--local-rank", "--local_rank", type=int, default=0)',
    ),
    Rule(
        name="main-guard-missing",
        patterns=(
            r"start a new process before the current process has finished its bootstrapping phase",
            r"freeze_support\(\)",
            r"reduction\.dump\(process_obj…BrokenPipeError",
        ),
        what='the script starts processes outside of if __name__ == "__main__":',
        why="with spawn (Windows, macOS, CUDA) every worker imports the script, and would start more workers",
        confirm="grep -n __main__ train.py",
        fix='move the code into main(), and add at the end:\nif __name__ == "__main__":\n    main()',
    ),
    Rule(
        name="cannot-pickle",
        patterns=(
            r"Can't pickle",
            r"can(?:no|')t pickle '?\w+",
            r"Can't get local object '",
            r"Can't get attribute '[^'\n]+' on <module '__(?:mp_)?main__'",
            r"cannot serialize '",
            r"PicklingError",
        ),
        unless=(r"Weights only load failed", r"torch\.load\("),
        what="an object cannot be sent to a spawned process",
        why="lambdas, nested functions, open files, locks and generators cannot be pickled",
        confirm='python -c "import pickle, train; pickle.dumps(train.make_dataset())"   # with your own names',
        fix="move the function to module level, use functools.partial instead of lambda, open files in the worker\n"
        'on Linux, without CUDA in the workers: DataLoader(multiprocessing_context="fork")',
    ),
)
