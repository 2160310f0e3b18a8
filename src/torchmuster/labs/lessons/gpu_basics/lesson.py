"""The lab's exercises, texts about mistakes, and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="gpu-basics",
    title="GPU basics and profiling",
    exercises=(
        Exercise(name="benchmark", title="time a matrix product", points=5, ranks=1),
        Exercise(name="measurements", title="robust measurements", points=5, ranks=1),
        Exercise(name="memory", title="memory of a training step", points=5, ranks=1),
        Exercise(name="analysis", title="conclusions", points=5, ranks=1),
    ),
    words={
        "wrong-clock": Word(
            "the time is not measured with time.perf_counter",
            "time.time() is the wall clock: it can jump, and is coarser",
            "begin = time.perf_counter()",
        ),
        "no-synchronize": Word(
            "the clock is read before the device has finished",
            "GPU calls only queue work: without waiting you measure only the queueing, which is "
            "1000 times faster",
            "call wait_for(device) after the loop, before the clock is read again",
        ),
        "no-warm-up": Word(
            "the first product is part of the measurement",
            "it loads libraries and selects kernels, which takes as long as 1000 products",
            "run a few products before the clock is first read",
        ),
        "warm-up-timed": Word(
            "the warm-up is part of the measurement",
            "the device was still busy with it when the clock was first read",
            "call wait_for(device) after the warm-up, before the clock is first read",
        ),
        "total-not-mean": Word(
            "the result is the time of all products, not of one",
            "with more iterations the device would look slower",
            "divide by iterations",
        ),
        "flops-halved": Word(
            "half of the operations are missing",
            "each of the n^3 steps of a product is a multiplication and an addition",
            "2 * size**3 / seconds / 1e12",
        ),
        "outlier-decides": Word(
            "one disturbed sample determines the result",
            "the mean is sensitive to outliers",
            "the median: statistics.median(samples)",
        ),
        "speedup-upside-down": Word(
            "the faster case has a speed-up below 1",
            "the speed-up is the time before divided by the time after",
            "before_s[size] / after_s[size]",
        ),
        "elements-not-bytes": Word(
            "elements were counted, not bytes",
            "a float32 takes 4 bytes, a bfloat16 2",
            "tensor.nbytes, which is numel() * element_size()",
        ),
        "state-before-step": Word(
            "the optimizer state was counted before it existed",
            "Adam creates its averages in the first step: two more values per weight",
            "optimizer.step() first, then add up optimizer.state",
        ),
        "weights-as-activations": Word(
            "weights are counted among the activations",
            "autograd saves them for backward too, but they need no additional memory",
            "leave out storages with the data_ptr() of a parameter",
        ),
        "activations-twice": Word(
            "the same memory is counted more than once",
            "two operations save the same tensor: the output of ReLU is the input of the next "
            "layer",
            "count each storage once, by untyped_storage().data_ptr()",
        ),
        "everything-halves": Word(
            "all bytes are halved",
            "under autocast weights, gradients and optimizer states stay in 32 bits",
            "only the activations: half of them, divided by the sum of all",
        ),
        "best-not-sufficient": Word(
            "the result is the size with the best rate",
            "the question is which size saturates the device; larger sizes gain little",
            "the smallest size with rate >= 0.9 * best",
        ),
    },
    questions=(
        "Which size saturates this device? What limits it below that size?",
        "Which kind of bytes was the largest? How does each one change with the batch size?",
        "Compare the rate with what muster bench matmul finds. What could explain a difference?",
    ),
    on_gpus="Expect a GPU to be slower below "
    "sizes of a few hundred, "
    "where launching takes longer than computing, and 10 to 100 times faster above. muster doctor "
    "checks whether "
    "driver, toolkit and torch are compatible; muster profile shows the time breakdown of a step.",
    counts=True,
)
