"""The lab's exercises, words and questions."""

from torchmuster.labs.lesson import Exercise, Lesson, Word

LESSON = Lesson(
    name="gpu-basics",
    title="GPU basics and profiling",
    exercises=(
        Exercise(name="benchmark", title="time a product of matrices", points=5, ranks=1),
        Exercise(name="measurements", title="figures that can be trusted", points=5, ranks=1),
        Exercise(name="memory", title="what fills memory in a step", points=5, ranks=1),
        Exercise(name="analysis", title="what follows from it", points=5, ranks=1),
    ),
    words={
        "wrong-clock": Word(
            "the time is not taken from time.perf_counter",
            "time.time() is the wall clock: it is set and jumps, and is coarser",
            "begin = time.perf_counter()",
        ),
        "no-synchronise": Word(
            "the clock is read before the device is done",
            "a GPU is only given the work: without waiting one times the giving, 1000 times too fast",
            "wait_for(device) after the loop, before the second look at the clock",
        ),
        "no-warm-up": Word(
            "the first product is part of the measurement",
            "it loads libraries and chooses kernels, which takes as long as a thousand products",
            "do a few products before the clock is first read",
        ),
        "warm-up-timed": Word(
            "the warm-up is part of the measurement",
            "the device was still busy with it when the clock was first read",
            "wait_for(device) after the warm-up, before the first look at the clock",
        ),
        "total-not-mean": Word(
            "it is the time of all products, not of one",
            "with more iterations the device would look slower",
            "divide by iterations",
        ),
        "flops-halved": Word(
            "half of the operations are missing",
            "each of the n^3 steps of a product is a multiplication and an addition",
            "2 * size**3 / seconds / 1e12",
        ),
        "outlier-decides": Word(
            "one disturbed sample decides",
            "a mean follows every hiccup of the machine",
            "the median: statistics.median(samples)",
        ),
        "speedup-upside-down": Word(
            "what is faster has a speed-up below 1",
            "the speed-up is the time before divided by the time after",
            "before_s[size] / after_s[size]",
        ),
        "elements-not-bytes": Word(
            "numbers were counted, not bytes",
            "a float32 takes 4 bytes, a bfloat16 2",
            "tensor.nbytes, which is numel() * element_size()",
        ),
        "state-before-step": Word(
            "the optimiser's state was counted before there was one",
            "Adam makes its averages at the first step: two more numbers for each weight",
            "optimizer.step() first, then add up optimizer.state",
        ),
        "weights-as-activations": Word(
            "weights are counted among the activations",
            "autograd keeps them for backward too, but they are there anyway",
            "leave out storages whose data_ptr() is that of a parameter",
        ),
        "activations-twice": Word(
            "the same memory is counted more than once",
            "two operations keep the same tensor: what ReLU gives is what the next layer takes",
            "count each storage once, by untyped_storage().data_ptr()",
        ),
        "everything-halves": Word(
            "all bytes are halved",
            "under autocast weights, gradients and the optimiser's state stay in 32 bits",
            "only the activations: half of them, divided by the sum of all",
        ),
        "best-not-sufficient": Word(
            "it is the size with the best rate",
            "asked is from which size on a device is busy; beyond it more size brings little",
            "the smallest size with rate >= 0.9 * best",
        ),
    },
    questions=(
        "From which size on is this device busy? What does it do below that size?",
        "Which kind of bytes was the largest? How does each one change with the batch size?",
        "Compare the rate with what muster bench matmul finds. What could explain a difference?",
    ),
    on_gpus="The report measures the GPU too if there is one. Expect a GPU to lose below sizes of a few hundred, "
    "where giving the work takes longer than doing it, and to win by 10 to 100 times above. muster doctor says "
    "whether driver, toolkit and torch fit together; muster profile shows where a step's time goes.",
    counts=True,
)
