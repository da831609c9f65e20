"""Helpers that lack what a test does not need."""

from types import SimpleNamespace

from megatron.core.transformer._cuda_graphs.errors import CaptureFailedError
from megatron.core.transformer._cuda_graphs.te.agreement import CaptureAgreement
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper


class Alone(CaptureAgreement):
    """The agreement of one rank that is in no process group."""

    def __init__(self, stage, pipeline):
        pass

    def begin(self, where, module=None):
        pass

    def join(self):
        pass

    def objection(self, reason):
        return reason

    def finish(self):
        pass

    def failed(self, error):
        return CaptureFailedError(f"{type(error).__name__}")


def helper(**attributes):
    """A helper that has only the attributes that a test needs."""
    bare = object.__new__(TECudaGraphHelper)
    vars(bare).update(attributes)
    return bare


def config(**changes):
    return SimpleNamespace(**{"cuda_graph_impl": "transformer_engine", **changes})


class Failure(Exception):
    """Raised in place of a capture's."""


class CapturingHelper(TECudaGraphHelper):
    """A helper whose capture is ``capture``."""

    def __init__(self, capture, layers=1):
        self.config = config(fine_grained_activation_offloading=False, cuda_graph_layers_per_graph="all")
        self.flattened_callables = [SimpleNamespace(cuda_graphs=[]) for _ in range(layers)]
        self._engine = SimpleNamespace(name="native")  # type: ignore[assignment]
        self._capture_finished = self._graphs_created = False
        self._capture_layers = capture  # type: ignore[method-assign]
        self._new_agreement = lambda: Alone(None, None)  # type: ignore[method-assign]
        self._one_graph_serves_all = lambda: True
        self.resets = 0

    def _reset_after_capture(self):
        self.resets += 1
