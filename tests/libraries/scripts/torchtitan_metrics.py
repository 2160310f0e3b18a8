"""Log as torchtitan does. Its trainer needs a GPU; the class that logs does not."""

from torchtitan.components.metrics import MetricsProcessor

processor = object.__new__(MetricsProcessor)
for step, loss in ((1, 2.5), (2, 1.5)):
    try:
        processor.log(step, loss, loss + 1, grad_norm=0.5)
    except AttributeError as error:  # of the parts that are not there
        print(f"step {step}: {error}", flush=True)
