"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="memory",
    title="Memory",
    exercises=(
        Exercise(name="checkpointing", title="recompute instead of storing", points=5, ranks=1),
        Exercise(name="attention", title="attention without the score matrix", points=5, ranks=1),
        Exercise(name="frugality", title="the script that runs out of memory", points=5, ranks=1),
        Exercise(name="frequency", title="the fastest that fits", points=5, ranks=1),
    ),
    words={
        "nothing-recomputed": Word(
            "no layer is recomputed in backward",
            "all activations are stored, and no memory is saved",
            "value = checkpoint(part, value, use_reentrant=False)",
        ),
        "dropout-differs": Word(
            "dropout uses different random numbers when a layer is recomputed",
            "the gradient then belongs to a different forward pass than the loss",
            "keep the default preserve_rng_state=True",
        ),
        "reentrant-loses-gradients": Word(
            "the layers get no gradients",
            "the reentrant variant considers only its inputs: inputs without requires_grad stop "
            "the graph",
            "checkpoint(…, use_reentrant=False)",
        ),
        "layers-left-out": Word(
            "some layers are never called",
            "7 layers in parts of 3 are 3 + 3 + 1",
            "for begin in range(0, len(self.layers), self.every), and a slice that may be shorter",
        ),
        "attention-not-scaled": Word(
            "the scores are not divided by sqrt(d)",
            "softmax then selects almost only the largest score, and gradients vanish",
            "omit scale; the default is 1 / sqrt(d)",
        ),
        "not-causal": Word(
            "positions attend to later positions",
            "a language model then sees the answer: its loss is low, but its text is useless",
            "is_causal=causal",
        ),
        "plain-attention": Word(
            "the full score matrix is created",
            "at 32768 positions that is 2 GiB per head, twice with softmax",
            "torch.nn.functional.scaled_dot_product_attention computes it in tiles",
        ),
        "losses-keep-graphs": Word(
            "the list holds tensors with their graphs",
            "each one keeps its whole graph alive: memory grows with every batch until it runs out",
            "loss.item()",
        ),
        "whole-batch-at-once": Word(
            "the whole batch goes through the model at once",
            "activations grow with the batch; that is what ran out of memory",
            "inputs.split(micro_batch), backward for each part, one step at the end",
        ),
        "gradients-pile-up": Word(
            "gradients of earlier batches are still in .grad",
            "backward adds to .grad",
            "optimizer.zero_grad() at the start of each batch",
        ),
        "parts-not-weighted": Word(
            "the smaller last part counts as much as the others",
            "the step then differs from a step on the whole batch",
            "multiply each part's loss by len(part) / len(inputs)",
        ),
        "validation-keeps-graphs": Word(
            "validation stores activations for a backward that never runs",
            "validation then needs more memory than training",
            "with torch.no_grad():",
        ),
        "over-budget": Word(
            "the choice does not fit",
            "the fastest is without checkpoints, which ran out of memory",
            "first select those with peak_bytes <= budget_bytes",
        ),
        "least-memory-not-fastest": Word(
            "it chose the smallest, not the fastest that fits",
            "unused memory has no benefit, but a faster step does",
            "min over those that fit, by seconds",
        ),
        "nothing-fits": Word(
            "it fails if nothing fits",
            "min() of an empty sequence raises; the result must be None",
            "min(…, default=None)",
        ),
    },
    questions=(
        "Which frequency keeps the fewest bytes, and why is it neither 1 nor all layers?",
        "How much longer does a step take with it? Compare with a third, the cost of a second "
        "forward.",
        "How do the bytes of both kinds of attention grow with the sequence? From which length on "
        "does it matter?",
    ),
    on_gpus="scaled_dot_product_attention uses FlashAttention or cuDNN there: 2 to 4 times as "
    "fast at long "
    "sequences, memory linear in the length. With a GPU, torch.cuda.max_memory_allocated() shows the peak; "
    "muster plan predicts whether a training run fits, and muster bench memory measures what "
    "recomputing blocks saves.",
    counts=True,
)
