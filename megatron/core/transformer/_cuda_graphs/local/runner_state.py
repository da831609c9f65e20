"""What a runner of local graphs holds: its function, what was recorded of it, and its graphs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..engine.quantization import Quantization, QuantizedReplay
from ..engine.rng import current_rng_state
from ..engine.slot import GraphedSlot, WarmupRecord
from ..errors import CallOrderError
from ..replay_conditions import autocast_in_force
from .arguments import ArgMetadata, _check_supported_type, described, metas_of
from .forward_only import Evaluation
from .nodes import LocalReplay, _GraphStatus
from .record import _CudagraphGlobalRecord
from .sharded_weights import ShardedWeights
from .turns import Turn


class RunnerState(torch.nn.Module):
    """All attributes of ``_CudaGraphRunner``, which takes the same arguments, and how its graphs are freed.

    Attributes:
        status: Which pass comes next.
        fwd_graph_recorded, bwd_graph_recorded: Whether a pass was recorded, for its graph to be captured.
        cudagraph_created: Whether the graphs are there.
        fwd_graph, bwd_graph: The graphs, if they were captured. To delete either, or assign None, frees both.
        grad_enabled: Whether there is a backward graph, or will be.
        is_frozen: Whether the recorded call had nothing to differentiate.
        is_forward_only: Whether grad was off in the recorded call, though gradients may be wanted.
        changes_state: Whether the forward graph writes buffers of the module, or metrics of MoE layers.
        evaluation: Whether the forward graph may serve evaluation.
        is_first_layer, is_last_layer: Whether the module is the first, or last, of its model chunk; true where
            ``annotate_first_last_layer`` has not said.
        params_to_backprop: The parameters that get a gradient.
        fwd_graph_input_arg_metas, fwd_graph_input_kwarg_metas: Descriptions of the arguments.
        num_warmup_steps: How often the module runs before capture, to warm up.
        backward_retain_grad: Whether the backward pass keeps autograd's graph (``cuda_graph_retain_backward_graph``).
        function: What it runs, for comparison with other runners.
        turn: When its passes are due, once they were captured.
        backward_pass: Which of autograd's backward passes recorded its own; others of the same pass share it.
        module: ``base_module``, or what stands for it if that is no module.
        parts: The modules that run in the forward graph.
    """

    # torch.nn.Module's __setattr__ looks for parameters and submodules, which takes time in every replay.
    __setattr__ = object.__setattr__

    def __init__(
        self,
        base_module: Any,
        mempool: tuple,
        fwd_graph_input_args: Sequence[Any],
        fwd_graph_input_kwargs: Mapping[str, Any],
        func: Callable | None,
        need_backward: bool,
        cache_key: Hashable | None = None,
    ):
        super().__init__()
        torch.nn.Module.__setattr__(self, "base_module", base_module)
        self.module = _module_of(base_module)
        self.backward_pass = -1
        self._shared_params: tuple[torch.Tensor, ...] = ()
        self.mempool = mempool
        self.cache_key = cache_key
        for value in (*fwd_graph_input_args, *fwd_graph_input_kwargs.values()):
            _check_supported_type(ArgMetadata(value))
        self.fwd_graph_input_arg_metas = [_meta_of_argument(value) for value in fwd_graph_input_args]
        self.fwd_graph_input_kwarg_metas = {
            name: _meta_of_argument(value) for name, value in fwd_graph_input_kwargs.items()
        }
        self.function: tuple = (base_module, func)
        self.func = func or (lambda *args, **kwargs: torch.nn.Module.__call__(base_module, *args, **kwargs))
        self.grad_enabled = need_backward and torch.is_grad_enabled()
        self.is_forward_only = need_backward and not torch.is_grad_enabled()
        self.changes_state = False
        self.evaluation = Evaluation()
        self._unread_outputs: set[int] = set()
        self.status = _GraphStatus.FWD_READY
        self.fwd_graph_recorded = self.bwd_graph_recorded = self.cudagraph_created = False
        self.is_first_layer = getattr(base_module, "is_first_layer", True)  # annotate_first_last_layer says so
        self.is_last_layer = getattr(base_module, "is_last_layer", True)
        config = getattr(base_module, "config", None)
        self.num_warmup_steps = getattr(config, "cuda_graph_warmup_steps", 0)
        self.backward_retain_grad = getattr(config, "cuda_graph_retain_backward_graph", False)
        self.fp8_enabled = getattr(config, "fp8", None) is not None
        self.fp4_enabled = getattr(config, "fp4", None) is not None
        self.params_to_backprop: tuple[torch.nn.Parameter, ...] = ()
        self._returned: Any = None
        self.bwd_graph_replay_complete_event = torch.cuda.Event()
        self.is_frozen = False
        self.turn = Turn()
        self._session = _CudagraphGlobalRecord.session
        self._sharded = ShardedWeights(self.module)
        self._slot: GraphedSlot | None = None
        self._replay: LocalReplay | None = None
        self._quantization: Quantization | None = None
        self._quantized: QuantizedReplay | None = None
        self._escaping: set[int] = set()
        self._warmup = WarmupRecord()
        self._input_metas: list[ArgMetadata] = []
        self._output_metas: list[ArgMetadata] = []
        self._writes_inputs = False
        self.parts: tuple[torch.nn.Module, ...] = ()
        self._rng_state = current_rng_state()
        self._autocast: Callable[[], AbstractContextManager] = nullcontext
        self.autocast = autocast_in_force()
        self._output_addresses: list[int] = []
        self._input_surface: tuple[torch.Tensor, ...] = ()
        self._fwd_graph: Any = None
        self._bwd_graph: Any = None

    @property
    def name(self) -> str:
        """What errors and profiles call the runner."""
        number = getattr(self.base_module, "layer_number", None)
        own = "" if not hasattr(self.func, "__name__") or self.func.__name__ == "<lambda>" else f".{self.func.__name__}"
        return f"{'' if number is None else f'layer {number} '}({type(self.base_module).__name__}){own}"

    def __str__(self) -> str:
        metas = metas_of(self.fwd_graph_input_arg_metas, self.fwd_graph_input_kwarg_metas)
        return f"{self.name} on {', '.join(str(tuple(meta.shape)) for meta in metas if meta.is_tensor) or 'no tensors'}"

    @property
    def fwd_graph(self) -> Any:
        """The forward graph, if it was captured."""
        return self._fwd_graph

    @fwd_graph.setter
    def fwd_graph(self, graph: Any) -> None:
        self._fwd_graph = graph
        if graph is None:
            self._free_graphs()

    @fwd_graph.deleter
    def fwd_graph(self) -> None:
        self._free_graphs()

    @property
    def bwd_graph(self) -> Any:
        """The backward graph, if it was captured."""
        return self._bwd_graph

    @bwd_graph.setter
    def bwd_graph(self, graph: Any) -> None:
        self._bwd_graph = graph
        if graph is None:
            self._free_graphs()

    @bwd_graph.deleter
    def bwd_graph(self) -> None:
        self._free_graphs()

    @property
    def gtp_remat(self) -> bool:
        """Whether weights of the module are sharded over ranks (``--tensor-parallel-num-weight-shards``)."""
        return bool(self._sharded)

    def expect(self, status: _GraphStatus) -> None:
        """Refuse a pass that is not due.

        Raises:
            CallOrderError: the other pass comes next.
        """
        if self.status is not status:
            due, called = ("backward", "forward") if status is _GraphStatus.FWD_READY else ("forward", "backward")
            raise CallOrderError(f"{self.name}: a {called} pass, but its {due} pass comes next")

    def reset(self) -> None:
        """Free the graphs and return to the state before recording."""
        self._free_graphs()
        self._sharded.forget()
        self._session = _CudagraphGlobalRecord.session
        self.evaluation = Evaluation()
        self._input_metas, self._output_metas = [], []
        self.fwd_graph_recorded = self.bwd_graph_recorded = self.cudagraph_created = False
        self.status = _GraphStatus.FWD_READY

    def _free_graphs(self) -> None:
        if self._slot is not None:
            for param in self._slot.params:
                if getattr(param, "_cudagraph_wgrad_ready_event", None) is self.bwd_graph_replay_complete_event:
                    del param._cudagraph_wgrad_ready_event
            self._slot.reset()
        self._slot = self._replay = self._fwd_graph = self._bwd_graph = None
        self.params_to_backprop, self._input_surface = (), ()


def _module_of(base: Any) -> torch.nn.Module:
    """The module that functions of ``base`` use: ``base`` itself, or the modules among its attributes."""
    if isinstance(base, torch.nn.Module):
        return base
    return torch.nn.ModuleList(value for value in vars(base).values() if isinstance(value, torch.nn.Module))


def _meta_of_argument(value: Any) -> ArgMetadata:
    return ArgMetadata(value if isinstance(value, torch.Tensor) else described(value))
