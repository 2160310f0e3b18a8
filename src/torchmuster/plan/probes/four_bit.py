"""Linear layers of 4 bits by bitsandbytes (QLoRA), with real weights or on tensors without memory.

bitsandbytes has rules for tensors without memory, so its own layers are traced. Only its parameter
class cannot hold such tensors: here the weights are plain parameters.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchmuster.errors import Impossible
from torchmuster.plan.torch_private import parameters_and_buffers, with_memory

INSTALL = "pip install 'torchmuster[qlora]'"
_KIND, _BLOCK = "nf4", 64


def bitsandbytes() -> Any:
    """Import bitsandbytes; raise an error that names its extra if it is not installed."""
    try:
        import bitsandbytes as found
    except ImportError as error:
        raise Impossible(
            "4-bit weights need bitsandbytes, which is not installed", why=str(error), fix=INSTALL
        ) from error
    return found


def replace_linear_layers(
    model: nn.Module, compute: torch.dtype, *, whole: Sequence[str] = ()
) -> None:
    """Replace the linear layers of a model by 4-bit ones, in place, except its output layer.

    Layers named in ``whole`` stay, too. Weights with values are quantized; those on the meta device
    are only marked.
    """
    library = bitsandbytes()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if _is_linear(layer) and layer is not head and name not in whole:
                setattr(parent, name, _four_bit(layer, compute, library))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # peft's layers depend on it


def _is_linear(layer: nn.Module) -> bool:
    """Return whether transformers would quantize a layer: Conv1D is GPT-2's, with inputs first."""
    return type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"


def _four_bit(layer: Any, compute: torch.dtype, library: Any) -> nn.Module:
    values = layer.weight if type(layer) is nn.Linear else layer.weight.t()
    outputs, inputs = values.shape
    made: nn.Module = library.nn.Linear4bit(
        inputs,
        outputs,
        bias=layer.bias is not None,
        compute_dtype=compute,
        quant_type=_KIND,
        device="meta",
    )
    parameters, _ = parameters_and_buffers(made)
    if layer.bias is not None:
        parameters["bias"] = layer.bias
    if values.is_meta:
        # bitsandbytes' own cannot be copied on the meta device. peft reads the two attributes.
        weight: Any = nn.Parameter(values.detach(), requires_grad=False)
        weight.compress_statistics, weight.quant_type = True, _KIND
    else:
        weight = library.nn.Params4bit(values.detach(), quant_type=_KIND, module=made)
        weight = weight.to(values.device)  # this quantizes
    parameters["weight"] = weight
    return made


def quantize_without_memory(model: nn.Module) -> None:
    """Give 4-bit layers whose weights have no memory the tensors of quantized ones, in place."""
    layers = [layer for layer in model.modules() if _is_four_bit(layer)]
    if not layers:
        return
    library = bitsandbytes()
    with with_memory():  # it computes a table from values once, and keeps it
        library.functional.quantize_4bit(
            torch.zeros(1, _BLOCK), compress_statistics=True, quant_type=_KIND
        )
    for module in layers:
        parameters, _ = parameters_and_buffers(module)
        weight = parameters["weight"]
        if hasattr(weight, "quant_state"):
            continue
        packed, state = library.functional.quantize_4bit(
            weight.detach(), blocksize=_BLOCK, compress_statistics=True, quant_type=_KIND
        )
        quantized: Any = nn.Parameter(packed, requires_grad=False)
        quantized.quant_state = state
        parameters["weight"] = quantized


def _is_four_bit(module: nn.Module) -> bool:
    """Return whether a module is a 4-bit layer, without an import of bitsandbytes."""
    return isinstance(module, nn.Linear) and type(module).__name__ == "Linear4bit"


def quantization_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the scales and tables of 4-bit weights, which are neither parameters nor buffers."""
    for weight in model.parameters():
        state = getattr(weight, "quant_state", None)
        while state is not None:
            for tensor in (state.absmax, state.code, state.offset):
                if tensor is not None:
                    yield tensor
            state = state.state2


def whole_shape(weight: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape of a 4-bit weight before it was packed; None for others."""
    state = getattr(weight, "quant_state", None)
    return None if state is None else tuple(state.shape)


def is_product(operation: Any) -> bool:
    """Return whether an operation multiplies by a 4-bit weight."""
    return bool(
        operation.namespace == "bitsandbytes" and operation.overloadpacket.__name__ == "gemm_4bit"
    )


def product(
    given: torch.Tensor,
    packed: torch.Tensor,
    shape: list[int],
    scales: torch.Tensor,
    block: int,
    kind: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by a 4-bit weight in single operations, as bitsandbytes does for many rows.

    On CUDA it has a kernel without these temporary tensors, for at most 1,536 rows.
    """
    library = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = (
            library.dequantize_blockwise(absmax_8bit, scales, absmax_code, 256, torch.float32)
            + absmax_offset
        )
    weight = library.dequantize_4bit(packed, scales, block, kind, shape, given.dtype).t()
    rows = given.reshape(-1, given.shape[-1])
    # A call of functional.linear would be recorded as one operation, without its product.
    result = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return result.view(*given.shape[:-1], shape[0])
