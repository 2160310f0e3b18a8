"""Slurm errors."""

from torchmuster.known_errors.rule import Role, Rule

RULES = (
    Rule(
        name="slurm-oom",
        patterns=(
            r"oom[-_]kill event",
            r"Exceeded (?:job|step) memory limit",
            r"exceeded memory limit",
            r"(?:srun|slurmstepd)[^\n]{0,120}(?:Out Of Memory|oom)",
            # as sacct shortens it; not a file or module of that name
            r"\bOUT_OF_ME\+|(?<![./])\bOUT_OF_MEMORY\b(?!\.py)",
            r"Some of (?:your processes|the step tasks) (?:may )?(?:have )?been (?:OOM )?killed",
        ),
        unless=(r"CUDA_ERROR_OUT_OF_MEMORY", r"oom-kill:constraint=CONSTRAINT_NONE"),
        what="the job used more memory than it requested from Slurm",
        confirm="sacct -j JOB --format=JobID,State,ReqMem,MaxRSS,ExitCode",
        fix="#SBATCH --mem=64G            # per node; or --mem-per-cpu, --mem-per-gpu\n"
        "or use less: fewer DataLoader workers, one copy of the data per node",
    ),
    Rule(
        name="slurm-gres",
        patterns=(
            r"Requested node configuration is not available",
            r"Invalid generic resource \(gres\) specification",
            r"Invalid (?:gres|Trackable RESource|GRES)",
            r"Requested (?:GRES|gres) option unsupported",
            r"Invalid generic resource",
        ),
        what="no node of that partition has the requested resources",
        why="no node has that GPU name, number of GPUs, memory or cores, or GPUs are not configured as gres",
        confirm="sinfo -o '%P %N %c %m %G'   # partition, nodes, cores, memory, GPUs",
        fix="request what is available:\nsbatch --partition=P --gres=gpu:4 --mem=… --cpus-per-task=…",
    ),
    Rule(
        name="slurm-time-limit",
        patterns=(
            r"DUE TO TIME LIMIT",
            r"\bState=TIMEOUT\b|Job[^\n]{0,40}reached (?:its )?time ?limit",
        ),
        what="the job reached its time limit, and Slurm killed it",
        confirm="sacct -j JOB --format=JobID,State,Timelimit,Elapsed",
        fix="#SBATCH --time=24:00:00\n"
        "#SBATCH --signal=B:USR1@300   # signals the script 5 minutes before the limit, to save a checkpoint\n"
        "#SBATCH --requeue",
    ),
    Rule(
        name="slurm-preempted",
        patterns=(r"DUE TO PREEMPTION",),
        what="Slurm preempted the job for one with a higher priority",
        confirm="sacct -j JOB --format=JobID,State,Reason",
        fix="#SBATCH --requeue   # and save checkpoints, so that it can resume",
    ),
    Rule(
        name="slurm-node-failure",
        patterns=(r"DUE TO NODE FAILURE", r"\bNODE_FAIL\b"),
        what="a node of the job went down",
        confirm="sinfo -R   # which node, and why; scontrol show node NAME",
        fix="sbatch --exclude=NAME …   # and inform the administrators",
    ),
    Rule(
        name="slurm-launch",
        patterns=(
            r"Unable to create step",
            r"Task launch for[^\n]{0,60}failed",
            r"Communication connection failure",
            r"Unable to (?:contact slurm controller|confirm allocation|allocate resources)",
            r"Step creation (?:temporarily disabled|still disabled)",
            r"Job step creation (?:temporarily|still) disabled",
            r"Application launch failed",
            r"Zero Bytes were transmitted or received",
            r"Socket timed out on send/recv operation",
            r"Invalid job id specified|Invalid job credential|Job/step already completing",
            r"Timed out waiting for job step to complete",
            r"task \d+ launch failed|slurmd could not",
            r"Couldn't find the specified plugin name for mpi|MPI plugin type[^\n]{0,40}not found",
        ),
        unless=(
            r"Requested node configuration is not available",
            r"Invalid generic resource",
            r"oom[-_]kill event",
            r"DUE TO TIME LIMIT",
        ),
        what="srun could not start the tasks, or lost contact with a node",
        why="the step requests more than the job has (tasks, cores, memory), another step uses all of it, or a node "
        "or the controller does not answer",
        confirm="squeue -j JOB -s; scontrol show job JOB; sinfo -R",
        fix="request no more than the job has: srun --overlap --ntasks-per-node=1 …\n"
        "exclude a node that does not answer:\nsbatch --exclude=NAME …",
    ),
    Rule(
        name="slurm-launch",
        patterns=(r"srun: error: [^\n]{0,80}(?:task|step) launch|slurmstepd: error: execve",),
        role=Role.SYMPTOM,
        unless=(r"execve\(\):",),
        what="srun could not start the tasks",
        confirm="srun --ntasks=1 hostname",
        fix="check that the program and its folder exist on every node",
    ),
)
