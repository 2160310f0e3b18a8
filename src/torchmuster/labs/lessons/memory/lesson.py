"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="memory",
    title="Memory",
    exercises=(
        Exercise(name="checkpointing", title="compute again instead of keeping", points=5, ranks=1),
        Exercise(name="attention", title="attention without its square", points=5, ranks=1),
        Exercise(name="frugality", title="the script that runs out of memory", points=5, ranks=1),
        Exercise(name="frequency", title="the fastest that fits", points=5, ranks=1),
    ),
    words={
        "nothing-recomputed": Word(
            "no layer is computed again in backward",
            "then all activations are kept, and nothing is saved",
            "value = checkpoint(part, value, use_reentrant=False)",
        ),
        "dropout-differs": Word(
            "dropout draws other numbers when a layer is computed again",
            "the gradient belongs to another forward than the loss",
            "leave preserve_rng_state as it is (True)",
        ),
        "reentrant-loses-gradients": Word(
            "the layers get no gradients",
            "the reentrant kind looks at its inputs only: inputs that need no gradient end the graph",
            "checkpoint(…, use_reentrant=False)",
        ),
        "layers-left-out": Word(
            "some layers are never called",
            "7 layers in parts of 3 are 3 + 3 + 1",
            "for begin in range(0, len(self.layers), self.every), and a slice that may be shorter",
        ),
        "attention-not-scaled": Word(
            "the scores are not divided by sqrt(d)",
            "softmax then takes nearly only the largest one, and gradients vanish",
            "leave scale out; the default is 1 / sqrt(d)",
        ),
        "not-causal": Word(
            "places see those after them",
            "a language model then reads the answer: its loss is wonderful and its text useless",
            "is_causal=causal",
        ),
        "plain-attention": Word(
            "the square of all scores is made",
            "at 32768 places that is 2 GiB for each head, twice with softmax",
            "torch.nn.functional.scaled_dot_product_attention computes it in tiles",
        ),
        "losses-keep-graphs": Word(
            "the list holds tensors with their graphs",
            "each one keeps its whole forward alive: memory grows with every batch until it ends",
            "loss.item()",
        ),
        "whole-batch-at-once": Word(
            "the whole batch goes through the model at once",
            "activations grow with the batch; that is what ran out of memory",
            "inputs.split(micro_batch), backward for each part, one step at the end",
        ),
        "gradients-pile-up": Word(
            "gradients of earlier batches are still there",
            "backward adds to .grad",
            "optimizer.zero_grad() at the beginning of each batch",
        ),
        "parts-not-weighted": Word(
            "the smaller last part counts as much as the others",
            "the step is not that of the whole batch",
            "multiply each part's loss by len(part) / len(inputs)",
        ),
        "validation-keeps-graphs": Word(
            "validation keeps activations for a backward that never comes",
            "memory is highest where it could be lowest",
            "with torch.no_grad():",
        ),
        "over-budget": Word(
            "what it chose does not fit",
            "the fastest is without checkpoints, and that is what ran out of memory",
            "keep those with peak_bytes <= budget_bytes first",
        ),
        "least-memory-not-fastest": Word(
            "it chose the smallest, not the fastest that fits",
            "memory that is free is of no use; time is",
            "min over those that fit, by seconds",
        ),
        "nothing-fits": Word(
            "it fails where nothing fits",
            "min() of nothing is an error, and the answer is None",
            "min(…, default=None)",
        ),
    },
    questions=(
        "Which frequency keeps the fewest bytes, and why is it neither 1 nor all layers?",
        "How much longer does a step take with it? Compare with a third, which a second forward would be.",
        "How do the bytes of both kinds of attention grow with the sequence? From where on would you care?",
    ),
    on_gpus="scaled_dot_product_attention takes FlashAttention or cuDNN there: 2 to 4 times as fast at long "
    "sequences, memory linear in the length. With a GPU, torch.cuda.max_memory_allocated() shows the peak; "
    "muster plan says before the start whether a training fits, and muster bench memory measures which blocks to recompute.",
    counts=True,
)
