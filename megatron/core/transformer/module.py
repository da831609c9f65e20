"""Extends ``GraphableMegatronModule`` to replay graphs within ``__call__``, so that hooks still run."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer._cuda_graphs.inputs import from_static_offsets, to_inputs
from megatron.core.transformer._cuda_graphs.layer_graph import unchanged_dispatcher
from megatron.core.transformer._cuda_graphs.replacements import TakenForward
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class GraphableMegatronModule(_upstream.GraphableMegatronModule):
    """Extends megatron-core's ``GraphableMegatronModule``, a layer that can run as CUDA graphs:

    - A replay goes through ``torch.nn.Module``'s own call, so that the layer's hooks (for example Megatron-FSDP's) run
      before and after it as they do for ``forward``.
    - Static hidden states have the model's dtype instead of bf16.
    - The graph, not TransformerEngine, validates the arguments of a replay.
    - Under pipeline parallelism, a step with a different number of micro-batches than at capture raises an error.
    - A call that does not match the graphs runs eagerly if possible (see ``LayerGraph.fits``).
    - With ``--cuda-graph-packed-sequences``, attention graphs read the offsets of packed sequences.

    Attributes:
        replaying: The runner for Megatron-FSDP's hooks; set only during a call that replays.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__.get("cuda_graphs"):
            if "cu_seqlens_q" in kwargs:  # during capture
                kwargs = from_static_offsets(kwargs, self._tokens(args[0]))
            return super().__call__(*args, **kwargs)
        hidden_states: Any = args[0] if args else kwargs.get("hidden_states")
        graph = self.cuda_graphs[0]
        if not (self._should_call_te_cudagraph(*args, **kwargs) and graph.fits(hidden_states)):
            with unchanged_dispatcher(self):  # megatron-core's own call would replay
                return super(_upstream.GraphableMegatronModule, self).__call__(*args, **kwargs)
        if graph.packed is not None:
            kwargs = to_inputs(graph.name, kwargs, graph.packed, self._tokens(hidden_states))
        own, taken = self.__dict__, TakenForward(self, self._te_cuda_graph_replay)
        own["replaying"] = graph.runner
        try:  # not through __call__, which runs the compiled eager layer after `Module.compile`
            return torch.nn.Module._call_impl(self, *args, **kwargs)
        finally:
            taken.end()
            del own["replaying"]

    def _tokens(self, hidden_states: torch.Tensor) -> int:
        """Return the length of the unsplit sequence; ``hidden_states`` is this rank's part of it."""
        parts: int = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return len(hidden_states) * parts * int(self.config.context_parallel_size)

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, torch.Tensor]:
        """Return one set of static inputs, keyed by name.

        ``hidden_states`` is ``[sequence, micro-batch, hidden]`` in the dtype of hidden states between layers. The
        sequence dimension is sharded across context- and sequence-parallel ranks.
        """
        inputs = super().get_layer_static_inputs(seq_length, micro_batch_size)
        dtype = _hidden_states_dtype(self.config)
        inputs["hidden_states"] = inputs["hidden_states"].detach().to(dtype).requires_grad_()
        return inputs

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = getattr(self, "current_microbatch", 0)
        graph = self.cuda_graphs[microbatch % len(self.cuda_graphs)]
        if self.config.overlap_moe_expert_parallel_comm:  # its schedule bypasses __call__
            graph.snapshot.check()
        expected = graph.num_microbatches
        # Fewer micro-batches also change the order of passes: a graph could overwrite memory that another still reads.
        if expected is not None and (
            microbatch >= expected or (microbatch == 0 and get_num_microbatches() != expected)
        ):
            raise ValueError(
                f"graphs were captured for steps of {expected} micro-batches, but this step has "
                f"{max(microbatch + 1, get_num_microbatches())} (see --step-batch-size-schedule). Under pipeline "
                "parallelism, and with --overlap-moe-expert-parallel-comm, the numbers must be equal: call "
                "before_step() of each TECudaGraphHelper and VisionTECudaGraphHelper before each step to recapture"
            )
        if not args and "hidden_states" in kwargs:
            args = (kwargs.pop("hidden_states"),)
        kwargs["is_first_microbatch"] = microbatch == 0
        for hook, hook_args in self.cuda_graph_manual_hooks:
            hook(*hook_args)
        return graph.replay(args, kwargs)


def _hidden_states_dtype(config: Any) -> torch.dtype:
    """Return the dtype of hidden states between layers.

    It may differ from ``params_dtype``: ``--bf16`` and ``--fp16`` convert the whole model, and
    ``--fp32-residual-connection`` makes the embedding return fp32.
    """
    if config.fp32_residual_connection:
        return torch.float32
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else config.params_dtype
