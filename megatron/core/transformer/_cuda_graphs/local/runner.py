"""One module, or function of one, for one micro-batch as CUDA graphs that its first training step recorded."""

from .runner_capture import RunnerCapture
from .runner_for_callers import RunnerForCallers
from .runner_recording import RunnerRecording
from .runner_replay import RunnerReplay


class _CudaGraphRunner(RunnerRecording, RunnerCapture, RunnerReplay, RunnerForCallers):
    """Runs ``func`` of ``base_module`` eagerly while a step is recorded, and as CUDA graphs from then on.

    It serves one micro-batch at a time: from a forward pass to its backward pass it is busy. Its ``CudaGraphManager``
    makes as many as are busy at once.

    Args:
        base_module: The module whose parameters ``func`` uses.
        mempool: The memory pool of the graphs, a handle of ``torch.cuda.graph_pool_handle``.
        fwd_graph_input_args, fwd_graph_input_kwargs: Arguments of the call to record; calls to replay must be like it.
        func: What to run; None for the module's own call. With a function the base may be any object: the modules
            among its attributes are those that the function uses.
        need_backward: Whether gradients may be wanted; without, graphs are captured under ``torch.no_grad``.
        cache_key: The key by which the manager finds it; None if it is found by its arguments.

    Raises:
        ValueError: the module's configuration asks for what local graphs cannot do.
        TypeError: an argument is of a type that no graph takes.
    """
