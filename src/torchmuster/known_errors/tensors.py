"""Devices, dtypes and shapes of tensors; gradients."""

from torchmuster.known_errors.rule import Rule

_SHOW = "print(x.shape, x.dtype, x.device)   # of both tensors, before the line that failed"

RULES = (
    Rule(
        name="mixed-device-tensors",
        patterns=(
            r"Expected all tensors to be on the same device",
            r"Expected object of (?:device type|backend) \w+ but got (?:device type|backend)",
            r"Input type \(torch\.cuda\.\w+\) and (?:weight|bias) type \(torch\.(?!cuda)\w+\)",
            r"Input type \(torch\.(?!cuda)\w+\) and (?:weight|bias) type \(torch\.cuda\.\w+\)",
            r"module must have its parameters and buffers on device",
            r"(?:Input|indices)[^\n]{0,60}(?:not at the same device|on the same device)",
            r"tensors? (?:are|is) on different (?:devices|GPUs)|are on different devices",
            r"only work with single-device[^\n]{0,40}GPU modules",
            r"found at least two devices",
            r"Tensor for argument #\d '?\w+'? is on \w+, but expected",
            r"can't convert cuda:\d+ device type tensor to numpy",
            r"expected device \S+ but got device",
            r"tensors must be on the same device",
            r"located on different GPUs",
            r"Expected tensor to have CPU Backend",
            r"is not on the expected device",
            r"Expected object of type torch\.cuda\.\w+ but (?:found|got) type torch\.(?!cuda)\w+",
            r"Expected object of type torch\.(?!cuda)\w+ but (?:found|got) type torch\.cuda\.\w+",
        ),
        what="tensors on different devices were used together",
        why="part of the model or batch was not moved to the device, or a rank uses GPU 0 in addition to its own",
        confirm=_SHOW,
        fix='device = torch.device("cuda", int(os.environ["LOCAL_RANK"])); torch.cuda.set_device(device)\n'
        "model.to(device), and every tensor of the batch: x.to(device)\n"
        "register tensors stored in a module with register_buffer",
    ),
    Rule(
        name="dtype-mismatch",
        patterns=(
            r"expected scalar type \w+ but (?:found|got)",
            r"Expected object of (?:scalar )?type [\w.]+ but (?:got|found)",
            r"Input type \([\w.:]+\) and (?:weight|bias) type \([\w.:]+\) should be the same",
            r"(?:mat1 and mat2|m1 and m2|self and mat2|a and b|query, key,? and value)[^\n]{0,30}"
            r"(?:must|to) have the same dtype",
            r"Found dtype \w+ but expected \w+",
            r"result type \w+ can't be cast to",
            r"to have one of the following scalar types",
            r"not implemented for '(?:Half|BFloat16|Long|Int|Bool|Float|Double|Char|Byte)'",
            r"Must flatten tensors with (?:the same|uniform) d?type",
            r"requires the source and destination dtypes match",
            r"expected dtype \w+[^\n]{0,40} but got",
            r"to have the same dtype, but got",
            r"to have type \w+ but got \w+",
            r"must have (?:the )?same (?:dtype|data type)",
        ),
        unless=(
            r"Input type \(torch\.cuda\.\w+\) and \w+ type \(torch\.(?!cuda)\w+\)",
            r"Input type \(torch\.(?!cuda)\w+\) and \w+ type \(torch\.cuda\.\w+\)",
            r"Expected object of type torch\.cuda\.\w+ but \w+ type torch\.(?!cuda)\w+",
            r"Expected object of type torch\.(?!cuda)\w+ but \w+ type torch\.cuda\.\w+",
        ),
        what="tensors of different dtypes were used together, or the operation does not support a dtype",
        why="only part of the model is in half precision, or labels are not integers",
        confirm=_SHOW,
        fix='run the step under autocast: with torch.autocast("cuda", dtype=torch.bfloat16):\n'
        "or convert them: x.to(weight.dtype); labels: y.long()\n"
        "on the CPU use float32 or bfloat16 instead of float16",
    ),
    Rule(
        name="shape-mismatch",
        patterns=(
            r"shapes cannot be multiplied",
            r"size mismatch, (?:m1:|\[)",
            r"size of tensor a \(\d+\) must match the size of tensor b",
            r"Sizes of tensors must match except in dimension",
            r"stack expects each tensor to be equal size",
            r"shape '\[[\d, -]+\]' is invalid for input of size",
            r"Expected input batch_size \(\d+\) to match target batch_size",
            r"Target size \([^)]*\)+ must be the same as input size",
            r"Given (?:groups=\d+|input size)[^\n]{0,160}(?:expected input|Calculated output size)",
            r"Expected (?:\d+D|\d+-dimensional|\d+D or \d+D)[^\n]{0,60}(?:but got|input|tensor)",
            r"expanded size of the tensor \(\d+\) must match",
            r"could not broadcast input array|operands could not be broadcast",
            r"output with shape \[[^\]]*\] doesn't match the broadcast shape",
            r"Expected size for first two dimensions",
            r"does not match the shape of the indexed tensor",
            r"Kernel size can't be greater than actual input size",
            r"mat1 dim 1 must match mat2 dim 0",
            r"number of sizes provided \(\d+\)",
            r"inconsistent tensor sizes?",
            r"must have the same shape",
        ),
        unless=(r"copying a param with shape",),
        what="tensors with incompatible shapes were used together",
        confirm=_SHOW,
        fix="compare the shapes in the message with what the layer expects\n"
        "if only the last batch of an epoch fails: DataLoader(drop_last=True); if samples have different lengths: pad them",
    ),
    Rule(
        name="amp-unscale",
        patterns=(
            r"Attempting to unscale FP16 gradients",
            r"unscale_\(\) has already been called",
            r"No inf checks were recorded",
            r"unscale_\(\) is being called after step\(\)",
            r"step\(\) has already been called since the last update\(\)",
            r"Gradient scaling[^\n]{0,60}(?:not supported|requires)",
        ),
        what="the gradient scaler was called in the wrong order, or on weights in half precision",
        why="the scaler needs weights in float32 under autocast, one unscale_ and one step per update",
        confirm="print({p.dtype for p in model.parameters()})   # float32?",
        fix="keep the weights in float32 (no model.half()), and in this order:\n"
        "scaler.scale(loss).backward(); scaler.unscale_(opt); clip_grad_norm_(…); scaler.step(opt); scaler.update()\n"
        "bfloat16 needs no scaler",
    ),
    Rule(
        name="inplace-modification",
        patterns=(
            r"modified by an inplace operation",
            r"a leaf Variable that requires grad[^\n]{0,40}in-?place",
            r"is a view and is being modified inplace",
        ),
        what="a tensor that the backward pass needs was modified in place",
        why="common causes are x += y, relu_() and inplace=True; under DDP also buffers (BatchNorm) if the model runs twice before backward",
        confirm="torch.autograd.set_detect_anomaly(True)   # the traceback then names the operation",
        fix="write x = x + y instead of x += y, and inplace=False\n"
        "under DDP with several forward passes: DistributedDataParallel(model, broadcast_buffers=False)",
    ),
    Rule(
        name="backward-twice",
        patterns=(
            r"Trying to backward through the graph a second time",
            r"buffers have already been freed",
            r"Saved intermediate values of the graph are freed",
        ),
        what="backward was called twice through the same graph",
        why="a state or loss of the previous step is still part of the graph",
        confirm="torch.autograd.set_detect_anomaly(True)",
        fix="detach tensors kept between steps: hidden = hidden.detach(); total += loss.item()\n"
        "if two losses share a graph: (loss1 + loss2).backward()",
    ),
    Rule(
        name="no-grad-path",
        patterns=(
            r"element \d+ of (?:tensors|variables) does not require grad|does not have a grad_fn",
            r"None of the inputs have requires_grad=True",
            r"DistributedDataParallel is not needed when a module doesn't have any parameters that require",
            r"optimizer got an empty parameter list",
        ),
        what="the loss does not depend on any trainable weight",
        why="all weights are frozen, the forward pass ran under no_grad or detach, or activation checkpointing broke the graph",
        confirm="print(loss.requires_grad, sum(p.requires_grad for p in model.parameters()))",
        fix="make some weights trainable: p.requires_grad_(True)\n"
        "with activation checkpointing and frozen inputs: model.enable_input_require_grads(), or "
        "checkpoint(…, use_reentrant=False)",
    ),
)
