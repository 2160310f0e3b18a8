"""Record the metrics that torchtitan logs. Its checkpoints are DCP's, which every script's rank records."""

from types import ModuleType

from torchmuster.integrations import recorder as recording
from torchmuster.integrations.wrap import Call, wrap

# Arguments of ``MetricsProcessor.log`` -> names of the recorded numbers.
_NAMES = {"global_avg_loss": "loss", "global_max_loss": "loss_max", "grad_norm": "grad_norm"}


def watch_metrics(module: ModuleType) -> None:
    """Record what every ``MetricsProcessor`` logs from now on: mean and highest loss of all ranks, gradient norm."""

    def logged(call: Call) -> None:
        arguments = call.arguments
        values = {own: arguments[name] for name, own in _NAMES.items() if name in arguments}
        recording.log(arguments["step"], **values)

    wrap(module.MetricsProcessor, "log", before=logged)
