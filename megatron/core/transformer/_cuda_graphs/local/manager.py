"""``CudaGraphManager``, which records, captures and replays the graphs of one module."""

import copy
import gc
from collections.abc import Callable, Collection, Hashable, Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch

from megatron.core.process_groups_config import ProcessGroupCollection

from ..engine.graph import leave_default_stream
from ..engine.rng import check_rng_tracker
from ..errors import NoGraphError, OptionsError
from ..flags.table import refuse_fsdp_hooks
from ..hooks import refuse_pre_hooks
from .arguments import described, tensors_of
from .memory import release_pools
from .record import _CudagraphGlobalRecord
from .runner import _CudaGraphRunner, _GraphStatus
from .sharded_weights import forget_replay_streams, gather_into_pool


class CudaGraphManager(torch.nn.Module):
    """Runs one module, or one of its methods, with CUDA graphs.

    - Training: the first step runs eagerly and is recorded, ``create_cudagraphs`` captures it, and later steps replay.
    - Inference (a call with ``inference_context``, or ``inline_capture``): the first call with each kind of arguments
      is captured and replayed immediately.
    - Evaluation, and passes without grad that were not part of the recorded step, run eagerly.

    Args:
        config: Configuration of the model, with ``cuda_graph_impl="local"``.
        base_module: The module, or other object, whose method is replaced; only with ``function_name``.
        function_name: The method of ``base_module`` to replace. The new method accepts two additional keywords:
            ``eager=True`` runs it without graphs, ``cache_key`` selects the graph.
        pg_collection: The process groups; defaults to those of ``parallel_state``.
        inline_capture: Whether to capture every graph at its first call.
        num_warmup_steps: Number of runs before a capture; defaults to the configuration's ``cuda_graph_warmup_steps``.

    Attributes:
        global_mempool: Memory pool of all local graphs; None before the first manager and after ``delete_cuda_graphs``.
        cudagraph_runners: All runners. Runners without a key process one micro-batch at a time, and are sorted by their
            next use.
        custom_cudagraphs_lookup_table: Runners by the key of their calls.
        reuse_cudagraphs: Whether all micro-batches use the same graphs: True without pipeline parallelism.
        is_first_microbatch: Whether the next call is the first of a step and requantizes weights.

    Raises:
        OptionsError: ``config.cuda_graph_impl`` is not ``local``.
        UnsupportedError: Megatron's RNG tracker has states that graphs cannot use.
    """

    global_mempool: ClassVar[tuple | None] = None

    def __init__(
        self,
        config: Any,
        base_module: Any = None,
        function_name: str | None = None,
        need_backward: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        inline_capture: bool = False,
        num_warmup_steps: int | None = None,
    ):
        super().__init__()
        if config.cuda_graph_impl != "local":
            raise OptionsError(f"CudaGraphManager needs --cuda-graph-impl local, got {config.cuda_graph_impl!r}")
        check_rng_tracker()
        self.need_backward = need_backward
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.reuse_cudagraphs = self.pg_collection.pp.size() == 1
        self.is_first_microbatch = False
        self._inline_capture, self._num_warmup_steps = inline_capture, num_warmup_steps
        self.cudagraph_runners: list[_CudaGraphRunner] = []
        self.custom_cudagraphs_lookup_table: dict[Hashable, _CudaGraphRunner] = {}
        self.func: Callable | None = None
        if function_name is not None:
            self.func = getattr(base_module, function_name)
            # A partial, so that a deep copy calls its own module.
            setattr(base_module, function_name, partial(self._call_function, base_module))
        _CudagraphGlobalRecord.managers.add(self)
        _memory_pool()
        if need_backward and not inline_capture:
            # Autograd accumulates a gradient on the stream where DistributedDataParallel first used its parameter,
            # which must not be the default stream in a capture. megatron-core also leaves the default stream here.
            leave_default_stream()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CudaGraphManager":
        """Return a manager without graphs for a copy of the module. It shares this manager's process groups."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        memo[id(self.pg_collection)] = self.pg_collection
        own: dict[str, Any] = {"cudagraph_runners": [], "custom_cudagraphs_lookup_table": {}}
        copied.__dict__.update(copy.deepcopy({**self.__dict__, **own}, memo))
        _CudagraphGlobalRecord.managers.add(copied)
        return copied

    def call_ddp_preforward_hook(self, module: torch.nn.Module) -> None:
        """Run the forward-pre hooks of ``DistributedDataParallel`` on ``module`` to wait for its parameters.

        Raises:
            UnsupportedError: ``module`` has a different forward-pre hook, which replays would not run.
        """
        refuse_pre_hooks([module])
        for hook in module._forward_pre_hooks.values():
            hook(module)

    def get_cudagraph_runner(
        self,
        megatron_module: Any,
        args: tuple,
        kwargs: dict[str, Any],
        reuse_cudagraphs: bool,
        cache_key: Hashable | None = None,
    ) -> _CudaGraphRunner:
        """Return the runner for a call; create one if graphs can still be recorded.

        Args:
            reuse_cudagraphs: Whether to accept any free runner that matches the arguments, instead of only the next one
                in the order of the step's calls.
            cache_key: Selects the runner without comparing arguments.

        Raises:
            NoGraphError: Graphs were captured, but they do not match this call.
        """
        if cache_key is not None:
            runner = self.custom_cudagraphs_lookup_table.get(cache_key)
            if runner is None:
                runner = self._new_runner(megatron_module, args, kwargs, cache_key)
                self.custom_cudagraphs_lookup_table[cache_key] = runner
            return runner
        runner = self._fitting_runner(args, kwargs, reuse_cudagraphs)
        if runner is not None:
            return runner
        if _CudagraphGlobalRecord.cudagraph_created and not self._inline_capture:
            raise NoGraphError(self._why_none(megatron_module, args, kwargs))
        return self._new_runner(megatron_module, args, kwargs)

    def _fitting_runner(self, args: tuple, kwargs: dict[str, Any], reuse_cudagraphs: bool) -> _CudaGraphRunner | None:
        # Under pipeline parallelism, graphs replay in the order in which their micro-batches were recorded.
        next_only = int(_CudagraphGlobalRecord.cudagraph_created)
        for runner in self._without_key() if reuse_cudagraphs else islice(self._without_key(), next_only):
            if not self._problems(runner, args, kwargs):
                if not reuse_cudagraphs:
                    self.cudagraph_runners.remove(runner)
                    self.cudagraph_runners.append(runner)
                return runner
        return None

    def _without_key(self) -> Iterator[_CudaGraphRunner]:
        return (runner for runner in self.cudagraph_runners if runner.cache_key is None)

    def _new_runner(
        self, module: Any, args: tuple, kwargs: dict[str, Any], cache_key: Hashable | None = None
    ) -> _CudaGraphRunner:
        runner = _CudaGraphRunner(module, _memory_pool(), args, kwargs, self.func, self.need_backward, cache_key)
        if self._num_warmup_steps is not None:
            runner.num_warmup_steps = self._num_warmup_steps
        self.cudagraph_runners.append(runner)
        return runner

    def _why_none(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> str:
        lines = [
            f"no CUDA graph of {type(module).__name__} matches this call. With --cuda-graph-impl local, every step "
            "must have the same modules, --seq-length, --micro-batch-size and order of passes as the recorded step. "
            "Under pipeline parallelism, a step must not have more micro-batches than the recorded one "
            "(--global-batch-size, --rampup-batch-size), nor fewer with --recompute-modules. Call "
            "delete_cuda_graphs() to record the next step again."
        ]
        if not self.cudagraph_runners:
            lines.append("The module did not run in the recorded step: it is new, a copy, or part of another model.")
        for runner in self._without_key():
            lines += [f"{runner.name}:", *(f"  {problem}" for problem in self._problems(runner, args, kwargs))]
        return "\n".join(lines)

    def _problems(self, runner: _CudaGraphRunner, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        """Return one line per reason why ``runner`` cannot run a call."""
        if runner.status is not _GraphStatus.FWD_READY:
            return ["it is waiting for the backward pass of its last call"]
        problems = runner.get_mismatch_errors(args, kwargs)
        if not runner.fits_grad_mode(self.need_backward and torch.is_grad_enabled(), args, kwargs):
            problems.append("it was recorded without a backward pass")
        return problems

    def __call__(
        self, megatron_module: Any, args: tuple, kwargs: dict[str, Any], cache_key: Hashable | None = None
    ) -> Any:
        """Run ``megatron_module`` on ``args`` and ``kwargs``.

        Args:
            cache_key: Selects the graph for inference; defaults to the key of ``inference_context``, if there is one.

        Returns:
            The output of the module; always a tuple for inference calls.

        Raises:
            NoGraphError: No graph matches this call; lists how its arguments differ from the captured ones.
            RuntimeError: See ``_CudaGraphRunner.replay``.
        """
        context = kwargs.get("inference_context")
        if context is not None or self._inline_capture:
            if cache_key is None and context is not None:
                cache_key = _key_of(context, args, kwargs)
            output = self._run_inline(megatron_module, args, kwargs, cache_key)
        elif _CudagraphGlobalRecord.capture_failed or not getattr(megatron_module, "training", self.training):
            return self._run_eagerly(megatron_module, args, kwargs)
        elif _CudagraphGlobalRecord.cudagraph_created:
            output = self._replay(megatron_module, args, kwargs)
        else:
            leave_default_stream()
            if next(self._without_key(), None) is None and isinstance(megatron_module, torch.nn.Module):
                refuse_fsdp_hooks(megatron_module)
            runner = self.get_cudagraph_runner(megatron_module, args, kwargs, self.reuse_cudagraphs)
            output = runner.record_graph_capture(args, kwargs)
        if self.is_first_microbatch:  # setting an attribute of a module is slow
            self.is_first_microbatch = False
        return output

    def _call_function(
        self, base_module: Any, *args: Any, eager: bool = False, cache_key: Hashable | None = None, **kwargs: Any
    ) -> Any:
        """Run the replaced method, with graphs unless ``eager``. Installed as ``function_name`` of ``base_module``."""
        if eager:
            return self._run_eagerly(base_module, args, kwargs)
        output = self(base_module, args, kwargs, cache_key=cache_key)
        return output[0] if isinstance(output, tuple) and len(output) == 1 else output

    def _run_eagerly(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.func is not None:
            return self.func(*args, **kwargs)
        return torch.nn.Module.__call__(module, *args, **kwargs)

    def _replay(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        runner = self._fitting_runner(args, kwargs, self.reuse_cudagraphs)
        if runner is None:
            if self.need_backward and torch.is_grad_enabled():
                raise NoGraphError(self._why_none(module, args, kwargs))
            return self._run_eagerly(module, args, kwargs)
        # Even without grad: the first pass of a recomputed layer reads gathered parameters.
        for part in runner.parts:
            if part._forward_pre_hooks:
                self.call_ddp_preforward_hook(part)
        return runner.replay(self.is_first_microbatch, args, kwargs)

    def _run_inline(self, module: Any, args: tuple, kwargs: dict[str, Any], key: Hashable | None) -> tuple:
        record = _CudagraphGlobalRecord
        with torch.no_grad():
            runner = self.get_cudagraph_runner(module, args, kwargs, True, cache_key=key)
            if runner.fwd_graph is None:
                record.inference.capture_call(runner, args, kwargs)
                record.cudagraph_inference_record.append((runner, "fwd", described(args), described(kwargs)))
            return runner.replay_graph_capture(self.is_first_microbatch, args, kwargs)

    def begin_step(self) -> None:
        """Start a step: mark all runners as free, and restore their order of use."""
        for runner in self.cudagraph_runners:
            runner.status = _GraphStatus.FWD_READY
        if not self.reuse_cudagraphs:
            self.cudagraph_runners.sort(key=lambda runner: -1 if runner.graphs is None else runner.graphs.forward_turn)

    def forget_recorded(self, runners: Collection[_CudaGraphRunner]) -> None:
        """Remove ``runners`` whose calls were recorded but not captured."""
        self.cudagraph_runners = [runner for runner in self.cudagraph_runners if runner not in runners]

    def reset(self) -> None:
        """Remove all runners and free their graphs. Later captures use a new memory pool."""
        _forget_pool()
        for runner in self.cudagraph_runners:
            runner.reset()
        self.cudagraph_runners.clear()
        self.custom_cudagraphs_lookup_table.clear()


def _key_of(context: Any, args: tuple, kwargs: dict[str, Any]) -> Hashable:
    """Return the graph key for a call with an inference context."""
    if context.is_static_batching():
        first = kwargs["hidden_states"] if "hidden_states" in kwargs else tensors_of(args, kwargs)[0]
        return tuple(first.shape), context.is_decode_only()
    return context.padded_batch_dimensions


def delete_cuda_graphs() -> None:
    """Delete all local graphs, including inference graphs. The next training step is recorded again."""
    _CudagraphGlobalRecord.forget_graphs()
    _forget_pool()
    forget_replay_streams()
    gc.collect()
    torch.cuda.empty_cache()


def _memory_pool() -> tuple:
    if CudaGraphManager.global_mempool is None:
        CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
        gather_into_pool(torch.cuda.current_device(), CudaGraphManager.global_mempool)
    return CudaGraphManager.global_mempool


def _forget_pool() -> None:
    CudaGraphManager.global_mempool = None
    release_pools()
