"""Attributes and methods of a runner for megatron-core's tests, inference engines and plug-ins."""

from typing import Any

import torch

from .arguments import ArgMetadata, _check_supported_type, metas_of, tensors_of, with_tensors
from .runner_state import RunnerState


class RunnerForCallers(RunnerState):
    """Static tensors of the graphs, and walks through arguments, under megatron-core's names."""

    @property
    def fwd_graph_input_surface(self) -> tuple[torch.Tensor, ...]:
        """The static inputs, then ``params_to_backprop``.

        Of an input ``can_skip_replay_copy`` says whether replays of other graphs, or an earlier input of this one, put
        the value there.
        """
        return (*self._input_surface, *self.params_to_backprop)

    @property
    def num_dgrads(self) -> int:
        """How many tensors of ``fwd_graph_input_surface`` are inputs."""
        return len(self._input_surface)

    @property
    def fwd_graph_output_surface(self) -> tuple[torch.Tensor, ...]:
        """The static outputs."""
        return () if self._slot is None else tensors_of(self._slot.outputs)

    @property
    def fwd_graph_outputs(self) -> Any:
        """What the captured call returned, with the static outputs; None before the capture."""
        return None if self._slot is None else with_tensors(self._returned, iter(self.fwd_graph_output_surface))

    @property
    def static_grad_outputs(self) -> tuple[torch.Tensor, ...]:
        """The static gradients of the outputs that take part in autograd."""
        return () if self._slot is None else tensors_of(self._slot.grad_outputs)

    @property
    def static_grad_inputs(self) -> tuple[torch.Tensor | None, ...]:
        """The static gradients of the inputs; None for an input that gets none."""
        return () if self._slot is None else self._slot.grad_inputs

    def get_arg_metas(self, args: Any, kwargs: dict[str, Any] | None = None) -> list[ArgMetadata]:
        """Return the descriptions of tensors among described arguments."""
        return metas_of(args, kwargs)

    def get_tensors(
        self, args: Any, kwargs: dict[str, Any] | None = None, check_types: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors among the arguments, those in dataclasses and containers too.

        Raises:
            TypeError: with ``check_types``, an argument is of a type that no graph takes.
        """
        if check_types:
            for value in [args] if isinstance(args, torch.Tensor) else [*(args or ()), *(kwargs or {}).values()]:
                _check_supported_type(ArgMetadata(value))
        return tensors_of(args, kwargs)

    def to_list(self, x: Any) -> list[Any]:
        """Return a tensor in a list, and what can be iterated over as one."""
        return [x] if isinstance(x, torch.Tensor) else list(x)
