"""``CudaGraphManager``: runs a module eagerly, records it, captures it, or replays its graphs."""

import copy
import gc
from collections.abc import Callable, Collection, Hashable, Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch

from megatron.core.process_groups_config import ProcessGroupCollection

from ..engine.rng import check_rng_tracker
from ..engine.streams import leave_default_stream
from ..errors import NoGraphError, OptionsError, UnsupportedError
from ..flags.table import refuse_fsdp_hooks
from ..hooks import is_of_ddp
from .arguments import ArgMetadata, described
from .inference import key_of
from .memory import hold_pool, let_go_of_pools
from .nodes import _GraphStatus
from .record import _CudagraphGlobalRecord
from .runner import _CudaGraphRunner
from .sharded_weights import forget_replay_streams, gather_into_pool


class CudaGraphManager(torch.nn.Module):
    """Runs one module, or one function of it, with CUDA graphs.

    - Training: the first step runs eagerly and is recorded; ``create_cudagraphs`` captures it at its end; later steps
      replay, and so do passes without grad between them.
    - Inference (a call with ``inference_context``, or ``inline_capture``): the first call of each kind is captured and
      replayed at once.
    - Evaluation runs eagerly.

    Args:
        config: The model's configuration, with ``cuda_graph_impl="local"``.
        base_module: The module, or other object, whose method is replaced; only with ``function_name``.
        function_name: The method of ``base_module`` that this manager replaces. It then takes two more keywords:
            ``eager=True`` runs it without graphs, ``cache_key`` selects the graph.
        pg_collection: The process groups; by default those of ``parallel_state``.
        inline_capture: Whether all graphs are captured at their first call.
        num_warmup_steps: How often the module runs before its capture; by default the configuration's
            ``cuda_graph_warmup_steps``.

    Attributes:
        global_mempool: The memory pool of all local graphs; None before the first manager and after
            ``delete_cuda_graphs``. An attribute of the class.
        cudagraph_runners: All runners. Those of calls without a key, each for one micro-batch at a time, are in the
            order in which they are used next.
        custom_cudagraphs_lookup_table: The runners of calls with a key; None for an unknown key.
        reuse_cudagraphs: Whether all micro-batches use the same graphs, as without pipeline parallelism.
        is_first_microbatch: Whether the next call is a step's first, in which weights are quantized again.
        capture_failed: Whether a capture of its runners failed since ``reset``: it runs eagerly until then.

    Raises:
        OptionsError: ``config.cuda_graph_impl`` is not ``local``.
        UnsupportedError: Megatron's RNG tracker keeps states that a graph cannot use.
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
        self.cudagraph_runners: list[_CudaGraphRunner] = []
        self.custom_cudagraphs_lookup_table = _RunnersByKey()
        self.is_first_microbatch = False
        self._inline_capture = inline_capture
        self.capture_failed = False
        self._num_warmup_steps = num_warmup_steps
        self.func: Callable | None = None
        if function_name is not None:
            self.func = getattr(base_module, function_name)
            setattr(base_module, function_name, partial(self._call_function, base_module))  # copied with its module
        _CudagraphGlobalRecord.managers.add(self)
        _memory_pool()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CudaGraphManager":
        """Return a manager for a copy of the module. It has no graphs, and the process groups of this one."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        own = {"cudagraph_runners": [], "custom_cudagraphs_lookup_table": _RunnersByKey()}
        shared = {"pg_collection": self.pg_collection}
        others = {name: value for name, value in self.__dict__.items() if name not in (*own, *shared)}
        copied.__dict__.update(copy.deepcopy(others, memo) | own | shared)
        _CudagraphGlobalRecord.managers.add(copied)
        return copied

    def call_ddp_preforward_hook(self, module: torch.nn.Module) -> None:
        """Run the forward-pre hooks of ``DistributedDataParallel`` on ``module``, which wait for its parameters.

        Raises:
            UnsupportedError: ``module`` has another forward-pre hook, which replays would not run.
        """
        for hook in module._forward_pre_hooks.values():
            if not is_of_ddp(hook):
                raise UnsupportedError(
                    f"{type(module).__name__} has a forward-pre hook ({hook!r}), which a CUDA graph does not run. "
                    "--cuda-graph-impl local allows only hooks of DistributedDataParallel: remove the hook; with "
                    "--use-megatron-fsdp use --cuda-graph-impl transformer_engine."
                )
            hook(module)

    def get_cudagraph_runner(
        self,
        megatron_module: Any,
        args: tuple,
        kwargs: dict[str, Any],
        reuse_cudagraphs: bool,
        cache_key: Hashable | None = None,
    ) -> _CudaGraphRunner:
        """Return the runner for a call, a new one if graphs can still be recorded.

        That is the runner of ``cache_key`` if given; with ``reuse_cudagraphs`` the first one that is free and fits the
        arguments; otherwise the next one in the order of a step's calls.

        Raises:
            NoGraphError: graphs were captured, and none fits this call.
        """
        created = _CudagraphGlobalRecord.cudagraph_created
        wants_grad = self.need_backward and torch.is_grad_enabled()
        if cache_key is not None:
            runner = self.custom_cudagraphs_lookup_table.get(cache_key)
            if runner is None:
                runner = self._new_runner(megatron_module, args, kwargs, cache_key)
                self.custom_cudagraphs_lookup_table[cache_key] = runner
            return runner
        # Under pipeline parallelism graphs are replayed in the order in which their micro-batches were recorded.
        candidates = self._without_key() if reuse_cudagraphs else islice(self._without_key(), int(created))
        for runner in candidates:
            fits = runner.status is _GraphStatus.FWD_READY and runner.can_differentiate(wants_grad, args, kwargs)
            if fits and not runner.get_mismatch_errors(args, kwargs):
                if not reuse_cudagraphs:
                    self.cudagraph_runners.remove(runner)
                    self.cudagraph_runners.append(runner)
                return runner
        if created and not self._inline_capture:
            raise NoGraphError(self._why_none(megatron_module, args, kwargs, wants_grad))
        return self._new_runner(megatron_module, args, kwargs)

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

    def _why_none(self, module: Any, args: tuple, kwargs: dict[str, Any], wants_grad: bool) -> str:
        lines = [
            f"no CUDA graph of {type(module).__name__} is for this call. With --cuda-graph-impl local every step needs "
            "the same --seq-length, --micro-batch-size and order of passes as the first one. Under pipeline "
            "parallelism it may have no more micro-batches (--global-batch-size, --rampup-batch-size), and needs as "
            "many if activations are recomputed (--recompute-modules). After delete_cuda_graphs() the next step is "
            "recorded again."
        ]
        for runner in self._without_key():
            problems = runner.get_mismatch_errors(args, kwargs)
            if runner.status is not _GraphStatus.FWD_READY:
                problems.append("it waits for its backward pass")
            if not runner.can_differentiate(wants_grad, args, kwargs):
                problems.append("it was recorded without a backward pass")
            lines += [f"{runner.name}:", *(f"  {problem}" for problem in problems)]
        return "\n".join(lines)

    def __call__(
        self, megatron_module: Any, args: tuple, kwargs: dict[str, Any], cache_key: Hashable | None = None
    ) -> Any:
        """Run ``megatron_module`` on ``args`` and ``kwargs``.

        Args:
            cache_key: Selects the graph for inference; by default the key of ``inference_context``, if there is one.

        Returns:
            The output of the module; always a tuple if the call is one of inference.

        Raises:
            NoGraphError: no graph fits this call; lists how its arguments differ from those at capture.
            RuntimeError: a replay is not possible now.
        """
        context = kwargs.get("inference_context")
        if context is not None or self._inline_capture:
            if cache_key is None and context is not None:
                cache_key = key_of(context, args, kwargs)
            output = self._run_inline(megatron_module, args, kwargs, cache_key)
        elif self.capture_failed or not getattr(megatron_module, "training", self.training):
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
        """Run the function that this manager replaces; see ``function_name``."""
        if eager:
            return self._run_eagerly(base_module, args, kwargs)
        output = self(base_module, args, kwargs, cache_key=cache_key)
        return output[0] if isinstance(output, tuple) and len(output) == 1 else output

    def _run_eagerly(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.func is not None:
            return self.func(*args, **kwargs)
        return torch.nn.Module.__call__(module, *args, **kwargs)

    def _replay(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Also without grad: the first pass of a recomputed layer reads gathered parameters too.
        recorded = next(self._without_key(), None)
        if recorded is None:
            if self.need_backward and torch.is_grad_enabled():
                raise NoGraphError(
                    f"{type(module).__name__} is to be trained after the CUDA graphs were captured (--cuda-graph-impl "
                    "local), and did not run in the step that was recorded: it is another model's, a copy, or new. "
                    "Call delete_cuda_graphs() first: the next step is recorded anew, with all that runs in it."
                )
            return self._run_eagerly(module, args, kwargs)
        for part in recorded.call.parts:
            if part._forward_pre_hooks:
                self.call_ddp_preforward_hook(part)
        runner = self.get_cudagraph_runner(module, args, kwargs, self.reuse_cudagraphs)
        if runner.must_run_eagerly_without_grad():
            return self._run_eagerly(module, args, kwargs)
        return runner.replay(self.is_first_microbatch, args, kwargs)

    # ------------------------------------------------------------------------------------------------- inference

    def _run_inline(self, module: Any, args: tuple, kwargs: dict[str, Any], key: Hashable | None) -> tuple:
        record = _CudagraphGlobalRecord
        with torch.no_grad():
            runner = self.get_cudagraph_runner(module, args, kwargs, True, cache_key=key)
            if runner.fwd_graph is None or not runner.fwd_graph_recorded:
                record.inference.capture(runner, args, kwargs)
                record.cudagraph_inference_record.append((runner, "fwd", described(args), described(kwargs)))
            return runner.replay_graph_capture(self.is_first_microbatch, args, kwargs)

    # ------------------------------------------------------------------------------------------------- life cycle

    def begin_step(self) -> None:
        """Begin a step with the first runner; all are free."""
        for runner in self.cudagraph_runners:
            runner.status = _GraphStatus.FWD_READY
        if not self.reuse_cudagraphs:
            self.cudagraph_runners.sort(key=lambda runner: runner.turn.bit)

    def forget_recorded(self, runners: Collection[_CudaGraphRunner]) -> None:
        """Forget those of ``runners`` that belong to this manager; they have no graphs yet."""
        self.cudagraph_runners = [runner for runner in self.cudagraph_runners if runner not in runners]

    def reset(self) -> None:
        """Forget all runners, and free their graphs; record again. Later graphs are captured into another pool."""
        _forget_pool()
        self.capture_failed = False
        for runner in self.cudagraph_runners:
            runner.reset()
        self.cudagraph_runners = []
        self.custom_cudagraphs_lookup_table = _RunnersByKey()


class _RunnersByKey(dict[Hashable, "_CudaGraphRunner | None"]):
    """Runners by the key of their calls.

    megatron-core's keys for static batching, ``(sequence length, is_decode_only)``, find the first runner of that kind;
    the keys here hold the whole shape, so that another batch size has a graph of its own.
    """

    def __missing__(self, key: Hashable) -> "_CudaGraphRunner | None":
        for known, runner in self.items():
            match known:
                case ((length, *_), decode_only) if (length, decode_only) == key:
                    return runner
        return None


def delete_cuda_graphs() -> None:
    """Delete all graphs of ``--cuda-graph-impl local``, also those for inference. The next step is recorded again."""
    _CudagraphGlobalRecord.forget_graphs()
    _forget_pool()
    forget_replay_streams()
    gc.collect()
    torch.cuda.empty_cache()


def alloc_tensor_from_graph_mempool(meta: ArgMetadata) -> torch.Tensor:
    """Return a new tensor of zeros like ``meta`` in the memory pool of local graphs.

    After the tensor is freed, graphs that are captured later may use its memory.
    """
    pool, device = _memory_pool(), torch.cuda.current_device()
    hold_pool(pool)
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        tensor = meta.zeros_like()
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)  # drops the use count that beginAllocate added
    vars(tensor)["is_from_global_mempool"] = True  # for make_weakref
    return tensor


def _memory_pool() -> tuple:
    if CudaGraphManager.global_mempool is None:
        CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
        gather_into_pool(torch.cuda.current_device(), CudaGraphManager.global_mempool)
    return CudaGraphManager.global_mempool


def _forget_pool() -> None:
    CudaGraphManager.global_mempool = None
    let_go_of_pools()
