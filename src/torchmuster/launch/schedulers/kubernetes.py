"""Print a job as Kubernetes objects: one Indexed Job, and the headless Service that gives its pods names.

Every pod runs the same ``muster run`` or ``muster train`` and finds its node rank in the environment (``node_group.py``), so there
is one template for any number of pods. Pod 0 is the launcher: it restarts the ranks of all pods and lets pods that were replaced
join again. The cluster only replaces pods, and has to know which exit codes mean that.
"""

import re
from dataclasses import dataclass
from typing import Literal

from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.schedulers import node_group
from torchmuster.launch.schedulers.time_limits import POD_VARIABLE
from torchmuster.redaction import redact_command

# The ranks' grace period, and the time beyond it for the launcher to kill ranks that do not stop, and to exit.
_GRACE_S, _TO_END_S = 30, 15
_MAX_RESTARTS = 3
# The launcher decides when a run has failed (--max-restarts); this stops pods that can never start.
_REPLACEMENTS, _REPLACEMENTS_PER_POD = 100, 10
# A shell's exit codes for a command that does not exist or cannot be executed.
_NO_COMMAND = (126, 127)
# The name is part of the pods' host names, which have at most 63 characters.
_NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_LONGEST_HOST_NAME = 63

_TEMPLATE = """\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{batch.kubernetes.io/job-name: {name}}}
  ports: [{{name: join, port: {port}}}]
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: {replacements}
  podFailurePolicy:
    rules:
    - {{action: Ignore, onPodConditions: [{{type: DisruptionTarget, status: "True"}}]}}
    - {{action: FailJob, onExitCodes: {{containerName: node, operator: In, values: {final_codes}}}}}
  successPolicy: {{rules: [{{succeededIndexes: "0"}}]}}
  template:
    spec:
      restartPolicy: Never
      subdomain: {name}
      terminationGracePeriodSeconds: {seconds_to_end}
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 1000
        fsGroup: 1000
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {{type: RuntimeDefault}}
      containers:
      - name: node
        image: {image}
        command: [muster]
        args:
{arguments}
        env:
{variables}
        # Add cpu and memory: requests equal to limits.
        resources: {resources}
        securityContext: {{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {{drop: [ALL]}}}}
        volumeMounts:
        - {{name: runs, mountPath: /runs}}
        - {{name: temporary, mountPath: /tmp}}
        - {{name: shared-memory, mountPath: /dev/shm}}
      volumes:
      # Checkpoints in an emptyDir end with their pod. To keep them: persistentVolumeClaim: {{claimName: NAME}}
      - {{name: runs, emptyDir: {{}}}}
      - {{name: temporary, emptyDir: {{}}}}
      # NCCL and data loaders need more than the usual 64 MiB. Counts as memory of the pod.
      - {{name: shared-memory, emptyDir: {{medium: Memory, sizeLimit: 8Gi}}}}
"""


@dataclass(frozen=True, kw_only=True)
class PodsRequest:
    """A job in pods: the image, the number of pods, and what ``muster`` runs in them.

    ``command`` follows ``muster run`` or ``muster train`` (``subcommand``). There is one rank per GPU, or one without GPUs.
    """

    name: str
    image: str
    command: tuple[str, ...]
    subcommand: Literal["run", "train"] = "run"
    nodes: int = 1
    gpus_per_node: int = 0


def render_job(request: PodsRequest) -> str:
    """Return the YAML of the Service and the Job, for ``kubectl apply -f -``.

    Raises:
        Impossible: the name is not a host name, or the command contains a secret.

    """
    _check(request)
    seconds_to_end = _GRACE_S + _TO_END_S
    final_codes = sorted({*map(int, node_group.FINAL - {ExitCode.GOOD}), *_NO_COMMAND})
    resources = "{}"
    if request.gpus_per_node:
        resources = f"{{limits: {{nvidia.com/gpu: {request.gpus_per_node}}}}}"
    arguments = [f"        - {_quoted(argument)}" for argument in _arguments(request)]
    variables = [f"        - {{{line}}}" for line in _variables(request, seconds_to_end)]
    return _TEMPLATE.format(
        name=_quoted(request.name),
        image=_quoted(request.image),
        nodes=request.nodes,
        replacements=max(_REPLACEMENTS, _REPLACEMENTS_PER_POD * request.nodes),
        final_codes=final_codes,
        seconds_to_end=seconds_to_end,
        port=node_group.LAUNCHER_PORT,
        arguments="\n".join(arguments),
        variables="\n".join(variables),
        resources=resources,
    )


def secret_command(request: PodsRequest) -> str:
    """Return the command that creates the Secret with which the pods find each other."""
    value = '--from-literal=secret="$(openssl rand -hex 32)"'
    return f"kubectl create secret generic {request.name}-join {value}"


def _check(request: PodsRequest) -> None:
    host_name = f"{request.name}-{request.nodes - 1}"
    if not _NAME.fullmatch(request.name) or len(host_name) > _LONGEST_HOST_NAME:
        raise Impossible(
            f"{request.name!r} is not a valid name for a Kubernetes job",
            why=f"the pods' host names ({host_name}) have lowercase letters, digits and dashes, begin with a letter, "
            f"and have at most {_LONGEST_HOST_NAME} characters",
            fix="--name train",
        )
    if redact_command(request.command) != list(request.command):
        raise Impossible(
            "the script's arguments contain a secret",
            why="the manifest would expose it to everyone who can read the job",
            fix="pass it as an environment variable from a Secret: add it below env in the YAML",
        )


def _arguments(request: PodsRequest) -> list[str]:
    """Return the arguments of ``muster``; the user's own follow and take precedence."""
    flags = [
        "--runs=/runs",
        f"--max-restarts={_MAX_RESTARTS}",
        f"--set=launch.grace={_GRACE_S}s",
    ]
    if not request.gpus_per_node:
        flags += ["--device=cpu", "--ranks=1"]
    # Kubernetes expands $(NAME) in arguments, and turns $$ into $.
    command = [argument.replace("$", "$$") for argument in request.command]
    if request.subcommand == "train":
        return ["train", *flags, *command]
    return ["run", *flags, "--", *command]


def _variables(request: PodsRequest, seconds_to_end: int) -> list[str]:
    """Return the environment of the pods: the fields of each variable, in YAML."""
    # Not $(JOB_COMPLETION_INDEX): the cluster defines that variable after these, so it would not be substituted.
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    job_uid = "metadata.labels['batch.kubernetes.io/controller-uid']"
    launcher = f"{request.name}-0.{request.name}:{node_group.LAUNCHER_PORT}"
    variables = [
        f'name: {node_group.NODES}, value: "{request.nodes}"',
        f'name: {node_group.NODE_RANK}, valueFrom: {{fieldRef: {{fieldPath: "{index}"}}}}',
    ]
    if request.nodes > 1:
        secret = f"{{name: {request.name}-join, key: secret}}"
        variables += [
            f'name: {node_group.LAUNCHER}, value: "{launcher}"',
            f"name: {node_group.SECRET}, valueFrom: {{secretKeyRef: {secret}}}",
        ]
    return [
        *variables,
        f"name: {node_group.RUN_ID}, value: {_quoted(request.name)}",
        f'name: {node_group.JOB_UID}, valueFrom: {{fieldRef: {{fieldPath: "{job_uid}"}}}}',
        f'name: {POD_VARIABLE}, value: "{seconds_to_end}"',
        # What programs expect of a user; the numeric user may not be known in the image.
        "name: HOME, value: /tmp",
        "name: USER, value: muster",
    ]


def _quoted(text: str) -> str:
    """Return a double-quoted YAML string. Python's escapes are also those of YAML 1.1, which kubectl reads."""
    escaped = text.encode("unicode_escape").decode("ascii")
    return '"' + escaped.replace('"', '\\"') + '"'
