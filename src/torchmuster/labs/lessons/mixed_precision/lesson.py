"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="mixed-precision",
    title="Mixed precision",
    exercises=(
        Exercise(name="train_step", title="a step under autocast", points=5, ranks=1),
        Exercise(name="scaled_step", title="scaling and clipping gradients", points=5, ranks=1),
        Exercise(name="first_bad_layer", title="where numbers went bad", points=5, ranks=1),
        Exercise(name="choose_precision", title="compare, and choose", points=5, ranks=1),
    ),
    words={
        "no-autocast": Word(
            "forward runs in 32 bits",
            "nothing is faster or smaller than before",
            "with torch.autocast(inputs.device.type, dtype=dtype): around model(inputs) and the loss",
        ),
        "backward-in-autocast": Word(
            "backward runs under autocast",
            "each operation's backward already has the type of its forward; autocast there is not "
            "supported and costs accuracy",
            "take loss.backward() out of the with block",
        ),
        "model-halved": Word(
            "the weights themselves are in 16 bits",
            "a small step is lost in rounding: 1 + 0.001 is 1 in bfloat16, and learning stops",
            "leave the model in float32; autocast converts what each operation needs",
        ),
        "loss-not-scaled": Word(
            "the loss is not scaled before backward",
            "small gradients are below the smallest number of fp16, and become 0",
            "scaler.scale(loss).backward()",
        ),
        "not-clipped": Word(
            "the gradients are not clipped",
            "one bad batch can throw the weights far away",
            "nn.utils.clip_grad_norm_(model.parameters(), max_norm) after scaler.unscale_(optimizer)",
        ),
        "clip-before-unscale": Word(
            "gradients are clipped while they are still scaled",
            "they are 1024 times too large here, so max_norm cuts nearly everything away",
            "scaler.unscale_(optimizer) first, then clip",
        ),
        "step-without-scaler": Word(
            "optimizer.step() is called past the scaler",
            "after an overflow the weights become NaN; the scaler would leave that step out",
            "scaler.step(optimizer)",
        ),
        "no-scaler-update": Word(
            "the scale is never adjusted",
            "after an overflow it must be halved, or every step is left out from then on",
            "scaler.update() at the end of each step",
        ),
        "only-nan": Word(
            "infinite numbers are passed over",
            "in fp16 it begins with inf (above 65504); NaN comes layers later, of inf - inf",
            "torch.isfinite(output).all(), which is False for both",
        ),
        "last-not-first": Word(
            "it names the last bad layer",
            "badness spreads through all that follow; only the first one is the cause",
            "keep the first name that was found",
        ),
        "hooks-left-behind": Word(
            "hooks are left in the model",
            "they look at every output from now on: each step is slower, and the next search sees double",
            "keep the handles of register_forward_hook, and remove() them in finally",
        ),
        "fastest-but-wrong": Word(
            "the fastest one is taken whatever it learned",
            "speed is compared among trainings that learn the same",
            "leave out those whose loss is more than 1 % from that of fp32",
        ),
        "nan-passes": Word(
            "a training that ended in NaN is taken",
            "every comparison with NaN is False, so `if gap > 0.01: leave it out` lets it pass",
            "keep what is good (gap <= 0.01) instead of leaving out what is bad; or math.isfinite",
        ),
        "absolute-gap": Word(
            "losses are compared by their difference",
            "1 % of what? A difference of 0.005 is half of a loss of 0.01",
            "abs(loss - reference) / abs(reference)",
        ),
    },
    questions=(
        "Does the loss of bf16 follow that of fp32? Where do they part, and does it matter?",
        "Which share of the activations' bytes was saved, and why is it not one half?",
        "Is bf16 faster on this machine? Why could it be slower on a CPU?",
    ),
    on_gpus="Tensor cores make 16-bit products about twice as fast and more; activations take half. Expect about "
    "2x, about half of the activations' memory and a loss within 1 %. fp16 needs the scaler, bf16 (from Ampere on) "
    "does not. muster bench precision measures your model in all of them.",
    counts=True,
)
