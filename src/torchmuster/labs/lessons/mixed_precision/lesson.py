"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="mixed-precision",
    title="Mixed precision",
    exercises=(
        Exercise(name="train_step", title="a step under autocast", points=5, ranks=1),
        Exercise(name="scaled_step", title="scaling and clipping gradients", points=5, ranks=1),
        Exercise(
            name="first_bad_layer", title="find the first non-finite layer", points=5, ranks=1
        ),
        Exercise(name="choose_precision", title="compare and choose", points=5, ranks=1),
    ),
    words={
        "no-autocast": Word(
            "forward runs in 32 bits",
            "nothing is faster or smaller than before",
            "with torch.autocast(inputs.device.type, dtype=dtype): around model(inputs) and the loss",
        ),
        "backward-in-autocast": Word(
            "backward runs under autocast",
            "each operation's backward already uses the dtype of its forward; autocast there is "
            "not "
            "supported and reduces accuracy",
            "move loss.backward() out of the with block",
        ),
        "model-halved": Word(
            "the weights themselves are in 16 bits",
            "a small step is lost in rounding: 1 + 0.001 is 1 in bfloat16, and learning stops",
            "leave the model in float32; autocast converts what each operation needs",
        ),
        "loss-not-scaled": Word(
            "the loss is not scaled before backward",
            "gradients below the smallest fp16 value become 0",
            "scaler.scale(loss).backward()",
        ),
        "not-clipped": Word(
            "the gradients are not clipped",
            "one bad batch can change the weights drastically",
            "nn.utils.clip_grad_norm_(model.parameters(), max_norm) after scaler.unscale_(optimizer)",
        ),
        "clip-before-unscale": Word(
            "gradients are clipped while they are still scaled",
            "they are 1024 times too large here, so clipping removes almost everything",
            "scaler.unscale_(optimizer) first, then clip",
        ),
        "step-without-scaler": Word(
            "optimizer.step() is called directly, not through the scaler",
            "after an overflow the weights become NaN; the scaler would skip that step",
            "scaler.step(optimizer)",
        ),
        "no-scaler-update": Word(
            "the scale is never adjusted",
            "after an overflow it must be halved, otherwise every later step is skipped",
            "scaler.update() at the end of each step",
        ),
        "only-nan": Word(
            "infinite values are ignored",
            "in fp16 the first problem is inf (above 65504); NaN follows layers later, from inf - "
            "inf",
            "torch.isfinite(output).all(), which is False for both",
        ),
        "last-not-first": Word(
            "it names the last bad layer",
            "all following layers are affected; only the first one is the cause",
            "return the first name found",
        ),
        "hooks-left-behind": Word(
            "hooks are left in the model",
            "they run on every output: each step is slower, and the next search runs them twice",
            "keep the handles of register_forward_hook, and remove() them in finally",
        ),
        "fastest-but-wrong": Word(
            "the fastest one is chosen regardless of its loss",
            "compare speed only among training runs that learn equally well",
            "exclude those whose loss differs by more than 1 % from fp32",
        ),
        "nan-passes": Word(
            "a training run that ended in NaN is chosen",
            "every comparison with NaN is False, so `if gap > 0.01: leave it out` does not "
            "exclude it",
            "select the good ones (gap <= 0.01) instead of excluding the bad ones; or use "
            "math.isfinite",
        ),
        "absolute-gap": Word(
            "losses are compared by their absolute difference",
            "1 % is relative: a difference of 0.005 is half of a loss of 0.01",
            "abs(loss - reference) / abs(reference)",
        ),
    },
    questions=(
        "Does the bf16 loss follow the fp32 loss? Where do they diverge, and does it matter?",
        "What share of the activations' bytes was saved, and why is it not one half?",
        "Is bf16 faster on this machine? Why could it be slower on a CPU?",
    ),
    on_gpus="Tensor cores compute 16-bit products at least twice as fast; activations take half the memory. "
    "Expect about "
    "2x, about half of the activations' memory and a loss within 1 %. fp16 needs the scaler, bf16 (from Ampere on) "
    "does not. muster bench precision measures a small GPT in all of them.",
    counts=True,
)
