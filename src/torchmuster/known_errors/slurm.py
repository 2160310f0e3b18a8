"""What Slurm says."""

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
        what="the job used more memory than it had asked Slurm for",
        confirm="sacct -j JOB --format=JobID,State,ReqMem,MaxRSS,ExitCode",
        fix="#SBATCH --mem=64G            # per node; or --mem-per-cpu, --mem-per-gpu\n"
        "or need less: fewer DataLoader workers, one copy of the data per node",
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
        what="no node of that partition has what the job asks for",
        why="the name or number of GPUs, memory or cores is not that of any node, or GPUs are not set up as gres",
        confirm="sinfo -o '%P %N %c %m %G'   # partition, nodes, cores, memory, GPUs",
        fix="ask for what is there:\nsbatch --partition=P --gres=gpu:4 --mem=… --cpus-per-task=…",
    ),
    Rule(
        name="slurm-time-limit",
        patterns=(
            r"DUE TO TIME LIMIT",
            r"\bState=TIMEOUT\b|Job[^\n]{0,40}reached (?:its )?time ?limit",
        ),
        what="the job came to its time limit, and Slurm ended it",
        confirm="sacct -j JOB --format=JobID,State,Timelimit,Elapsed",
        fix="#SBATCH --time=24:00:00\n"
        "#SBATCH --signal=B:USR1@300   # warns the script 5 minutes before, to save\n"
        "#SBATCH --requeue",
    ),
    Rule(
        name="slurm-preempted",
        patterns=(r"DUE TO PREEMPTION",),
        what="Slurm took the nodes for a more important job",
        confirm="sacct -j JOB --format=JobID,State,Reason",
        fix="#SBATCH --requeue   # and save checkpoints, so that it goes on where it was",
    ),
    Rule(
        name="slurm-node-failure",
        patterns=(r"DUE TO NODE FAILURE", r"\bNODE_FAIL\b"),
        what="a node of the job went down",
        confirm="sinfo -R   # which, and why; scontrol show node NAME",
        fix="sbatch --exclude=NAME …   # and tell the administrators",
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
        what="srun could not start the tasks, or lost touch with a node",
        why="the step asks for more than the job has (tasks, cores, memory), another step holds it all, or a node or the "
        "controller does not answer",
        confirm="squeue -j JOB -s; scontrol show job JOB; sinfo -R",
        fix="let the step ask for what the job has: srun --overlap --ntasks-per-node=1 …\n"
        "leave out a node that does not answer:\nsbatch --exclude=NAME …",
    ),
    Rule(
        name="slurm-launch",
        patterns=(r"srun: error: [^\n]{0,80}(?:task|step) launch|slurmstepd: error: execve",),
        role=Role.SYMPTOM,
        unless=(r"execve\(\):",),
        what="srun could not start the tasks",
        confirm="srun --ntasks=1 hostname",
        fix="see that the program and its folder exist on every node",
    ),
)
