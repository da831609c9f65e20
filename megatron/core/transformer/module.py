"""``GraphableMegatronModule`` that replays its graphs through its own call, so that its hooks run around them."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer._cuda_graphs.inputs import from_static_offsets, to_inputs
from megatron.core.transformer._cuda_graphs.layer_graph import LayerGraph, unchanged_dispatcher
from megatron.core.transformer._cuda_graphs.replacements import TakenForward
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class GraphableMegatronModule(_upstream.GraphableMegatronModule):
    """megatron-core's ``GraphableMegatronModule`` (a layer that can run as CUDA graphs), with these differences.

    - A replay goes through ``torch.nn.Module``'s own call: the layer's hooks, Megatron-FSDP's among them, run around it
      as they do around ``forward``.
    - Static inputs have the dtype of the model's hidden states, not always bf16.
    - Arguments of a replay are checked by the graph itself, and TransformerEngine is not needed for it.
    - Under pipeline parallelism another number of micro-batches than at capture is refused.
    - A pass that the graphs do not fit runs eagerly, where that is possible: one whose hidden states have another shape
      than at capture, or one after something changed that only an eager pass reads (``Snapshot``).
    - With ``--cuda-graph-packed-sequences`` graphs of attention take the offsets of packed sequences.

    Attributes:
        replaying: What Megatron-FSDP's hooks use in a call that replays graphs; absent in others.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__.get("cuda_graphs"):
            if "cu_seqlens_q" in kwargs:  # at capture
                kwargs = from_static_offsets(kwargs, self._tokens(args[0]))
            return super().__call__(*args, **kwargs)
        decide = self._should_call_te_cudagraph
        if getattr(decide, "__func__", None) is _decision:  # what it says where there are graphs
            replays = self.training and self.config.cuda_graph_impl == "transformer_engine"
        else:
            replays = decide(*args, **kwargs)
        if not replays:
            with unchanged_dispatcher(self):
                return super().__call__(*args, **kwargs)
        graph = self.cuda_graphs[0]
        if isinstance(graph, LayerGraph):  # others may put graphs there too
            hidden_states: Any = args[0] if args else kwargs.get("hidden_states")
            if not graph.fits(hidden_states):  # megatron-core's own call would decide again
                with unchanged_dispatcher(self):
                    return super(_upstream.GraphableMegatronModule, self).__call__(*args, **kwargs)
            if graph.packed is not None:
                kwargs = to_inputs(graph.name, kwargs, graph.packed, self._tokens(hidden_states))
        own, taken = self.__dict__, TakenForward(self, self._te_cuda_graph_replay)
        own["replaying"] = getattr(graph, "runner", None)
        try:  # not through __call__, which would run the eager layer that `Module.compile` has compiled
            return torch.nn.Module._call_impl(self, *args, **kwargs)
        finally:
            taken.end()
            del own["replaying"]

    def _tokens(self, hidden_states: torch.Tensor) -> int:
        """The tokens of a micro-batch of one row, whose part on this rank is ``hidden_states``."""
        parts: int = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return len(hidden_states) * parts * int(self.config.context_parallel_size)

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, torch.Tensor]:
        """Return one set of static inputs, by keyword.

        ``hidden_states`` is ``[sequence, micro-batch, hidden]``, its sequence divided among context- and
        sequence-parallel ranks, in the dtype in which hidden states pass between layers.
        """
        inputs = super().get_layer_static_inputs(seq_length, micro_batch_size)
        dtype = _hidden_states_dtype(self.config)
        inputs["hidden_states"] = inputs["hidden_states"].detach().to(dtype).requires_grad_()
        return inputs

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = getattr(self, "current_microbatch", 0)
        graph = self.cuda_graphs[microbatch % len(self.cuda_graphs)]
        if not isinstance(graph, LayerGraph):  # put there by someone else
            return super()._te_cuda_graph_replay(*args, **kwargs)
        if self.config.overlap_moe_expert_parallel_comm:  # its schedule does not call layers
            graph.fits(None)
        expected = graph.num_microbatches
        # Fewer micro-batches change the order of passes too, and a graph might overwrite memory that others still read.
        if expected is not None and (
            microbatch >= expected or (microbatch == 0 and get_num_microbatches() != expected)
        ):
            raise ValueError(
                f"graphs were captured for steps of {expected} micro-batches, and this one has "
                f"{max(microbatch + 1, get_num_microbatches())}: under pipeline parallelism, and with "
                "--overlap-moe-expert-parallel-comm, another number (--step-batch-size-schedule) needs "
                "other graphs. Call before_step() of each TECudaGraphHelper and VisionTECudaGraphHelper before each "
                "step, as Megatron's training loop does of the first: it captures them"
            )
        if not args and "hidden_states" in kwargs and not self.config.fine_grained_activation_offloading:
            args = (kwargs.pop("hidden_states"),)  # as megatron-core does it, without a copy of kwargs
            kwargs["is_first_microbatch"] = microbatch == 0
        else:
            # Not TransformerLayer's override, which needs TransformerEngine to make attention masks: the graph has one.
            args, kwargs = _upstream.GraphableMegatronModule._get_te_cuda_graph_replay_args(self, *args, **kwargs)
        for hook, hook_args in self.cuda_graph_manual_hooks:
            hook(*hook_args)
        return graph.replay(args, kwargs)


# megatron-core's decision whether a layer replays; subclasses and users may put another one in its place.
_decision = _upstream.GraphableMegatronModule._should_call_te_cudagraph


def _hidden_states_dtype(config: Any) -> torch.dtype:
    """The dtype in which hidden states pass between layers.

    ``--bf16`` and ``--fp16`` convert the whole model, whatever ``params_dtype`` is; with ``--fp32-residual-connection``
    the embedding returns fp32.
    """
    if config.fp32_residual_connection:
        return torch.float32
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else config.params_dtype
