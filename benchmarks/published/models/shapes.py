"""The shapes of the published models, from their own configurations."""

from decoder_memory import Decoder


def _llama(
    blocks: int, width: int, inner: int, heads: int, key_heads: int, vocabulary: int = 128256
) -> Decoder:
    return Decoder(
        blocks=blocks,
        width=width,
        inner=inner,
        heads=heads,
        key_heads=key_heads,
        vocabulary=vocabulary,
    )


# Of the settings of torchtitan (llama) and KempnerForge: the inner width is rounded up by their own rules.
SHAPES = {
    "llama2_7b": _llama(32, 4096, 11008, 32, 32, 32000),
    "llama2_13b": _llama(40, 5120, 13824, 40, 40, 32000),
    "llama2_70b": _llama(80, 8192, 28672, 64, 8, 32000),
    "llama3_8b": _llama(32, 4096, 14336, 32, 8),
    "llama3_70b": _llama(80, 8192, 28672, 64, 8),
    "llama3_405b": _llama(126, 16384, 53248, 128, 8),
    "kempner_8b": _llama(32, 4096, 14336, 32, 8),
    "kempner_13b": _llama(40, 5120, 17920, 40, 8),
    "qwen3_32b": Decoder(
        blocks=64,
        width=5120,
        inner=25600,
        heads=64,
        key_heads=8,
        head_width=128,
        vocabulary=151936,
    ),
}
