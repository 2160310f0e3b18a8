"""Checkpoints that cannot be loaded."""

from torchmuster.known_errors.rule import Rule

RULES = (
    Rule(
        name="checkpoint-keys",
        patterns=(
            r"Missing key\(s\) in state_dict",
            r"Unexpected key\(s\) in state_dict",
            r"Error\(s\) in loading state_dict for \w+:(?! size mismatch)",
            r"Missing key in checkpoint state_dict",
            r"size of (?:loaded )?state_dict keys",
            r"unexpected key \W?[\w.]+\W? in state_dict",
            r"missing keys? in (?:source )?state_dict",
        ),
        what="the parameter names in the checkpoint do not match the model",
        why="the checkpoint was saved from a model wrapped by DDP (names begin with module.) or torch.compile (_orig_mod.), "
        "or from another model",
        confirm="python -c \"import torch; print(list(torch.load('FILE', map_location='cpu', weights_only=True))[:5])\"",
        fix="save model.module.state_dict(); for an existing file: torch.nn.modules.utils."
        'consume_prefix_in_state_dict_if_present(state, "module.")\n'
        "if it is another model on purpose: load_state_dict(state, strict=False)",
    ),
    Rule(
        name="checkpoint-shape",
        patterns=(
            r"size mismatch for [\w.]+: copying a param with shape",
            r"copying a param with shape",
            r"size mismatch for [\w.]+",
            r"Trying to set a tensor of shape",
            r"ignore_mismatched_sizes",
        ),
        what="the tensor shapes in the checkpoint do not match the model",
        why="the model was built with other settings (number of classes, vocabulary, layers) than the saved one; or the "
        "file is one shard of a sharded checkpoint",
        confirm="print(model)   # compare with the shapes in the message",
        fix="build the model with the settings it was saved with\n"
        "or skip what differs: from_pretrained(…, ignore_mismatched_sizes=True); "
        "model.resize_token_embeddings(len(tokenizer))",
    ),
    Rule(
        name="checkpoint-corrupt",
        patterns=(
            r"failed finding central directory",
            r"PytorchStreamReader failed",
            r"unexpected EOF, expected \d+ more bytes",
            r"invalid load key",
            r"EOFError: Ran out of input|Ran out of input",
            r"Invalid magic number; corrupt file",
            r"storage has wrong (?:byte )?size",
            r"(?:archive is|file (?:might|may) be) corrupted",
            r"Error while deserializing header",
            r"pickle data was truncated",
            r"unpickling stack underflow",
            r"not a (?:ZIP|zip) (?:archive|file)|BadZipFile",
            r"SafetensorError",
            r"UnpicklingError: (?!Weights)",
        ),
        what="the checkpoint file is truncated or is not a checkpoint",
        why="the run that wrote it was killed while writing, the disk was full, several ranks wrote the same file, or "
        "the file is only a git-lfs pointer or an error page",
        confirm="ls -l FILE; head -c 200 FILE   # 'version https://git-lfs' is a pointer\n"
        "python -m zipfile -t FILE",
        fix="load the previous checkpoint, or download the file again:\ngit lfs pull\n"
        "to prevent this: write on rank 0 only, to a temporary name, then os.replace(new, name)",
    ),
    Rule(
        name="checkpoint-optimizer",
        patterns=(
            r"loaded state dict contains a parameter group that doesn't match",
            r"loaded state dict has a different number of parameter groups",
            r"optimizer state[^\n]{0,60}(?:mismatch|does not match|doesn't match)",
        ),
        what="the saved optimizer state does not match the model's parameters",
        why="since the state was saved, weights were frozen, added or grouped differently",
        confirm='print([len(g["params"]) for g in optimizer.param_groups], '
        '[len(g["params"]) for g in saved["param_groups"]])',
        fix="build the optimizer as it was when saved, with the same weights frozen\n"
        "or start with a new optimizer: load only the model",
    ),
    Rule(
        name="weights-only-load",
        patterns=(
            r"Weights only load failed",
            r"WeightsUnpickler error",
        ),
        unless=(r"invalid load key",),
        details=(r"GLOBAL (?P<type>[\w.]+)",),
        what="torch.load rejects a file that contains more than tensors and plain types",
        why="since torch 2.6 it loads weights only by default, because other files can run code when loaded",
        confirm="python -c \"import torch; print(torch.serialization.get_unsafe_globals_in_checkpoint('FILE'))\"",
        fix="allow the named type, if you trust it: torch.serialization.add_safe_globals([{type}])\n"
        "only for a file that you made or trust: torch.load(FILE, weights_only=False)",
    ),
)
