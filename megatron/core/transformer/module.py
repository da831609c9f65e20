"""``GraphableMegatronModule`` that replays its graphs through its own call, so that its hooks run around them.

Everything else of megatron-core's module of this path is megatron-core's own.
"""

from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


if TYPE_CHECKING:  # names that are megatron-core's own

    def __getattr__(name: str) -> Any: ...


class GraphableMegatronModule(_upstream.GraphableMegatronModule):
    """megatron-core's ``GraphableMegatronModule`` (a layer that can run as CUDA graphs), with three differences.

    - A replay goes through ``torch.nn.Module``'s own call: the layer's hooks, Megatron-FSDP's among them, run around it
      as they do around ``forward``.
    - Static inputs have the dtype of the model's hidden states, not always bf16.
    - Arguments of a replay are checked by the graph itself, and TransformerEngine is not needed for it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._should_call_te_cudagraph(*args, **kwargs) and self.cuda_graphs):
            return super().__call__(*args, **kwargs)
        # torch runs the hooks around whatever `forward` is at that moment. Not __call__: it would run what
        # `Module.compile` has made of the eager layer.
        own = {name: self.__dict__[name] for name in ("forward",) if name in self.__dict__}
        self.__dict__["forward"] = self._te_cuda_graph_replay
        try:
            return torch.nn.Module._call_impl(self, *args, **kwargs)
        finally:
            del self.__dict__["forward"]
            self.__dict__.update(own)  # a compiled or wrapped `forward` that a user set on this layer

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, torch.Tensor]:
        """Return one set of static inputs, by keyword.

        ``hidden_states`` is ``[sequence, micro-batch, hidden]``, its sequence divided among context- and
        sequence-parallel ranks, in the dtype in which hidden states pass between layers.
        """
        inputs = super().get_layer_static_inputs(seq_length, micro_batch_size)
        dtype = torch.float32 if self.config.fp32_residual_connection else self.config.params_dtype
        inputs["hidden_states"] = inputs["hidden_states"].detach().to(dtype).requires_grad_()
        return inputs

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        # Of the layer types only TransformerLayer overrides this, and only to make attention masks with
        # TransformerEngine; the graph has its own.
        replay_args = _upstream.GraphableMegatronModule._get_te_cuda_graph_replay_args
        args, kwargs = replay_args(self, *args, **kwargs)
        for hook, hook_args in self.cuda_graph_manual_hooks:
            hook(*hook_args)
        return self.cuda_graphs[getattr(self, "current_microbatch", 0) % len(self.cuda_graphs)](*args, **kwargs)
