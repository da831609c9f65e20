"""Snapshots of what CUDA graphs rely on, taken at capture and compared before replays.

A graph holds the operations of one pass and the addresses that they read and write. Which operations those are follows
from state that every eager pass reads and no replay does: modes, hooks, ``forward`` functions, parameters, dropout
probabilities, configurations, contexts of torch. A ``Snapshot`` compares it. Tensor values are not part of it: replays
read those. ``docs/limits.md`` lists what no snapshot covers.
"""

import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from functools import cache, partial
from itertools import chain
from operator import call, getitem, is_, is_not
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from megatron.core.model_parallel_config import ModelParallelConfig

from .errors import ArgumentTypeError, ChangedSinceCaptureError, UnsupportedError
from .hooks import HOOK_KINDS, is_of_ddp

_MISSING = object()
# Not all of ``megatron``: Megatron-Bridge's adapters, for example, are in ``megatron.bridge``.
_KNOWN_PACKAGES = (
    *("torch.", "megatron.core.", "megatron.training.", "megatron_fsdp_cuda_graphs.", "transformer_engine."),
    *("builtins.", "typing.", "abc."),
)
# What torch, megatron-core and this package set on any module.
_OF_ANY_MODULE = frozenset(
    (
        *vars(torch.nn.Module()),
        "_training_state",
        "forward",
        "cuda_graphs",
        "replaying",
        "current_microbatch",
        "is_first_microbatch",
        "input_tensor",  # of a later pipeline stage: graphs take it as an input
        "cuda_graph_manual_hooks",  # set after capture
        "backward_dw_wrapper",
        "cuda_graph_backward_dw_wrapper",
    )
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
# What training loops set in a configuration between steps.
_OF_LOOPS = frozenset(
    ("timers", "no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "grad_scale_func")
)
_ROUTING = ("router_replay_action", "target_topk_idx", "static_buffer")  # of megatron-core's RouterReplay
_GLOBAL_HOOKS = [getattr(torch_module, f"_global_{kind}") for kind in HOOK_KINDS]
# Functions of C, each a fraction of a microsecond.
CONTEXTS: dict[str, Callable[[], Any]] = {
    "detection of anomalies": torch.is_anomaly_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "hooks of saved tensors": partial(torch._C._autograd._top_saved_tensors_default_hooks, True),
    "TorchDispatchMode": torch._C._len_torch_dispatch_stack,
    "TorchFunctionMode": torch._C._len_torch_function_stack,
    "default dtype": torch._C.get_default_dtype,
    "library of matrix products": torch._C._get_blas_preferred_backend,
    "reduced precision in bf16 products": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    "reduced precision in fp16 products": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "sums of fp16 products in fp16": torch._C._get_cublas_allow_fp16_accumulation,
    "flash attention of torch": torch._C._get_flash_sdp_enabled,
    "memory-efficient attention of torch": torch._C._get_mem_efficient_sdp_enabled,
    "attention of torch by matrix products": torch._C._get_math_sdp_enabled,
    "attention of torch by cuDNN": torch._C._get_cudnn_sdp_enabled,
    "order of torch's attentions": torch._C._get_sdp_priority_order,
    "sums in half precision in attention of torch": torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    "cuDNN": torch._C._get_cudnn_enabled,
    "deterministic kernels of cuDNN": torch._C._get_cudnn_deterministic,
}
_IN_TF32 = {"TF32 in matrix products": ("cuda", "matmul"), "TF32 in convolutions": ("cuda", "conv")}


class Replays:
    """Whether graphs of this process are replayed.

    Attributes:
        suspended_by: Why all passes run eagerly; empty if they may replay.
    """

    suspended_by = ""

    @contextmanager
    def suspended(self, reason: str) -> Iterator[None]:
        """Run passes eagerly in this context; ``reason`` is what logs and errors say of it."""
        before, self.suspended_by = self.suspended_by, reason
        try:
            yield
        finally:
            self.suspended_by = before


replays = Replays()


class Aspect:
    """Things of one kind that must be what they were at capture.

    Args:
        names: What messages call each thing.
        read: Returns the things, always in the same order.
        glance: Returns something cheap that compares equal as long as ``read`` returns the same.
        then: The things at capture; by default copies of those that are there now.
        differs: Whether a thing differs from one at capture.
        show: Returns the text for a thing that is a number or a string in messages.
    """

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[], Sequence[Any]],
        glance: Callable[[], Any],
        then: Sequence[Any] | None = None,
        differs: "Callable[[Any, Any], bool] | None" = None,
        show: Callable[[Any], str] = repr,
    ):
        self._names, self._read, self.glance = list(names), read, glance
        self._differs, self._show = differs or differ, show
        self._then = list(map(kept, read())) if then is None else list(then)
        self.seen: Any = _MISSING
        if not self.change():
            self._look()

    def _look(self) -> None:
        try:
            self.seen = self.glance()
        except Exception:  # a tensor is None: each comparison is a thorough one
            self.seen = _MISSING

    def has_changed(self) -> bool:
        """Compare thoroughly, after ``glance`` returned something other than ``seen``."""
        if self.change():
            return True
        self._look()
        return False

    def change(self) -> str:
        """Return the name of the first thing that has changed, and what it was; empty without one."""
        try:
            return self._change()
        except Exception:  # something is gone, or a mode of torch intercepts the comparison
            return self._names[0]

    def _change(self) -> str:
        now = self._read()
        for name, one, other in zip(self._names, now, self._then, strict=False):
            if self._differs(one, other):
                return _described(name, other, one, self._show)
        return "" if len(now) == len(self._then) else f"the number of things like {self._names[0]}"


class Snapshot:
    """What graphs rely on, as it was when this object was made.

    Args:
        advice: What to do about a change, a clause for the end of a message.
    """

    def __init__(self, advice: str, *aspects: Aspect):
        self._advice, self._aspects = advice, aspects
        self._glances = [(aspect, aspect.glance) for aspect in aspects]

    def changed(self) -> bool:
        """Whether a replay would compute something else than an eager pass. It runs before each replay."""
        if replays.suspended_by:
            return True
        for aspect, glance in self._glances:
            try:
                if glance() == aspect.seen:
                    continue
            except Exception:  # a tensor or an attribute is gone
                pass
            if aspect.has_changed():
                return True
        return False

    def reason(self) -> str:
        """Return what has changed, and what to do about it."""
        if replays.suspended_by:
            return replays.suspended_by
        changes = dict.fromkeys(filter(None, (aspect.change() for aspect in self._aspects)))
        return f"changed since capture: {', '.join(changes)}; {self._advice}"

    def check(self) -> None:
        """Compare, before a replay that has no eager pass in its place.

        Raises:
            ChangedSinceCaptureError: something has changed; names it.
        """
        if self.changed():
            raise ChangedSinceCaptureError(self.reason())

    def forget(self) -> None:
        """Drop all references; nothing counts as changed any more."""
        self._aspects, self._glances = (), []


def equal(names: Iterable[str], values: Callable[[], list[Any]], then: Sequence[Any] | None = None) -> Aspect:
    """Compare values, none of them a tensor, by ``==``."""
    return Aspect(names, values, values, then)


def identities(names: Iterable[str], objects: Callable[[], Sequence[Any]]) -> Aspect:
    """Compare objects by ``is``."""
    return Aspect(names, objects, lambda: list(map(id, objects())), objects(), is_not)


def addresses(
    names: Iterable[str], tensors: Callable[[], Sequence[torch.Tensor | None]] | Sequence[torch.Tensor | None]
) -> Aspect:
    """Compare where tensors are; those that are None, or have no memory of their own, are at 0.

    Args:
        tensors: The tensors if they stay the same objects, or what returns the current ones.
    """
    current: Any = tensors if callable(tensors) else lambda: tensors
    return Aspect(
        names,
        lambda: list(map(address_of, current())),
        lambda: [tensor.data_ptr() for tensor in current()],  # without a call of ours per tensor
        show=hex,
    )


def address_of(tensor: torch.Tensor | None) -> int:
    """Return the address of ``tensor``; 0 for None and for tensors without memory of their own (quantized ones)."""
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except RuntimeError:
        return 0


class InputSignature:
    """Shapes, dtypes and ``requires_grad`` of the inputs that a callable was captured with.

    Args:
        name_of: Returns what errors call the input of this index.
        advice: The end of an error about another shape or dtype.
    """

    def __init__(self, owner: str, tensors: Sequence[torch.Tensor], name_of: Callable[[int], str], advice: str = ""):
        self._owner, self._name_of, self._advice = owner, name_of, advice
        self._expected = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]

    def __len__(self) -> int:
        return len(self._expected)

    def rename(self, owner: str, name_of: Callable[[int], str], advice: str) -> None:
        """Set how errors call the callable and its inputs, and their advice."""
        self._owner, self._name_of, self._advice = owner, name_of, advice

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """Whether there are as many ``inputs`` as at capture and ``check`` would find nothing wrong with them."""
        if len(inputs) != len(self._expected):
            return False
        for given, (shape, dtype, requires_grad) in zip(inputs, self._expected):  # noqa: B905
            if not isinstance(given, torch.Tensor) or given.shape != shape or given.dtype != dtype:
                return False
            if given.requires_grad and not requires_grad and torch.is_grad_enabled():
                return False
        return True

    def check(self, inputs: Sequence[Any]) -> None:
        """Compare ``inputs`` with those at capture; there must be as many.

        Raises:
            ArgumentTypeError: an input is not a tensor.
            ValueError: an input has another shape or dtype, or requires grad and did not at capture.
        """
        if self.accepts(inputs):
            return
        for index, (given, (shape, dtype, requires_grad)) in enumerate(zip(inputs, self._expected, strict=True)):
            if not isinstance(given, torch.Tensor):
                raise ArgumentTypeError(
                    f"{self._owner}: {self._name_of(index)} must be a tensor for a CUDA graph, got {given!r}"
                )
            if given.shape != shape or given.dtype != dtype:
                raise ValueError(
                    f"{self._owner} was captured with {self._name_of(index)} of {tuple(shape)} {dtype} and is called "
                    f"with {tuple(given.shape)} {given.dtype}{self._advice}"
                )
            if given.requires_grad and not requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{self._owner} was captured with {self._name_of(index)} that requires no grad, and it requires "
                    "grad now, which its CUDA graph does not compute: capture with an input that requires grad, or "
                    "detach it"
                )


# ------------------------------------------------------------------------------------------------------------ modules


def named(root: torch.nn.Module, name: str = "", parts: Iterable[torch.nn.Module] | None = None) -> dict[Any, str]:
    """Return the names of ``root`` and of all modules in ``parts`` of it, by module.

    Args:
        name: The name of ``root`` in messages; by default its class.
        parts: The modules in it that graphs hold; by default all.
    """
    held = None if parts is None else {inner for part in parts for inner in part.modules()}
    return {
        module: ".".join(filter(None, (name, inner))) or type(module).__name__
        for inner, module in root.named_modules()
        if held is None or module is root or module in held
    }


def module_aspects(
    modules: Mapping[torch.nn.Module, str],
    *,
    around: torch.nn.Module | None = None,
    replaced: torch.nn.Module | None = None,
    parameters: bool = True,
    contexts: Sequence[Any] | None = None,
    volatile: "frozenset[tuple[int, str]]" = frozenset(),
) -> list[Aspect]:
    """Return what passes read of modules and of torch's contexts.

    Args:
        modules: Those that ran in the capture, with their names.
        around: The one of them whose own hooks run around replays.
        replaced: The one of them whose ``forward`` replays take over.
        parameters: Whether replays find the parameters of the capture in modules.
        contexts: What ``contexts_in_force`` returned for the captured passes; by default what it returns now.
        volatile: What ``PassState`` has found passes to set.
    """
    own = list(map(vars, modules))
    owners = [
        (name, vars(module), partial(_declared, module, module is replaced, volatile))
        for module, name in modules.items()
    ]
    configs = {id(config): config for module in modules for config in _configurations(module)}
    filled = [(module._modules, f"the modules in {name}") for module, name in modules.items() if module._modules]
    children = [inner for inner, _ in filled]
    bases = dict.fromkeys(base for module in modules for base in type(module).__mro__ if "forward" in vars(base))
    functions = [vars(base) for base in bases]
    return [
        equal([*CONTEXTS, *_IN_TF32, *["autocast"] * 4], contexts_in_force, contexts),
        equal([f"training of {name}" for name in modules.values()], lambda: [each["training"] for each in own]),
        _Attributes(owners),
        *map(_options, configs.values()),
        Aspect(
            [name for _, name in filled],
            lambda: list(map(dict, children)),  # toggle_cuda_graphs takes a manager out and puts it last
            lambda: list(chain.from_iterable(map(dict.values, children))),
        ),
        equal([f"forward of {base.__name__}" for base in bases], lambda: [each["forward"] for each in functions]),
        _Hooks(modules, around, parameters),
        *(parameter_aspects(modules) if parameters else ()),
    ]


def memory_aspects(
    modules: Mapping[torch.nn.Module, str],
    *,
    buffers: bool = True,
    parameters: bool = False,
    main_grads: bool = False,
    volatile: "frozenset[tuple[int, str]]" = frozenset(),
) -> Iterator[Aspect]:
    """Yield where graphs of ``modules`` read and write: addresses of what is there now.

    Args:
        buffers: Whether buffers are compared, and tensors in attributes.
        main_grads: Whether graphs add to the ``main_grad`` of parameters.
        volatile: As of ``module_aspects``.
    """
    kinds = [kind for kind, wanted in (("_buffers", buffers), ("_parameters", parameters)) if wanted]
    places = [
        (getattr(module, kind), key, f"the address of {key} of {name}")
        for kind in kinds
        for module, name in modules.items()
        for key, tensor in getattr(module, kind).items()
        if tensor is not None  # some modules make a buffer only when they first need it
    ]
    places += [  # where ``.data`` can be put elsewhere
        (vars(module), key, f"the address of {key} of {name}")
        for module, name in (modules.items() if buffers else ())
        for key, value in _declared(module, volatile=volatile).items()
        if isinstance(value, torch.Tensor) and torch._C._has_storage(value)
    ]
    owners, keys = [own for own, _, _ in places], [key for _, key, _ in places]
    if places:
        yield addresses([name for *_, name in places], lambda: list(map(dict.get, owners, keys)))
    written = [
        (module._parameters, key, name)
        for module, name in modules.items()
        for key, param in module._parameters.items()
        if getattr(param, "main_grad", None) is not None
    ]
    if main_grads and written:
        yield addresses(
            [f"the address of the main gradient of {key} of {name}" for _, key, name in written],
            lambda: [getattr(own[key], "main_grad", None) for own, key, _ in written],
        )


def quantized_aspect(tensors: Callable[[], list[Any]]) -> Aspect:
    """Compare the FP8 tensors that graphs use: two lists of statistics, then lists of weights."""
    names = ["statistics of FP8"] * 2 + ["weights quantized to FP8"] * (len(tensors()) - 2)
    return Aspect(names, tensors, lambda: [list(map(id, own)) for own in tensors()], list(map(list, tensors())))


def parameter_aspects(modules: Mapping[torch.nn.Module, str]) -> Iterator[Aspect]:
    places = [
        (module._parameters, key, param, f"{key} of {name}")
        for module, name in modules.items()
        for key, param in module._parameters.items()
        if param is not None
    ]
    owners, keys = [own for own, *_ in places], [key for _, key, *_ in places]
    params = [param for _, _, param, _ in places]
    names = [name for *_, name in places]
    yield Aspect(
        names,
        lambda: list(map(dict.get, owners, keys)),
        lambda: all(map(is_, map(getitem, owners, keys), params)),
        params,
        is_not,
    )
    then = [param.requires_grad for param in params]
    yield equal(
        [f"requires_grad of {name}" for name in names],
        lambda: [param.requires_grad for param in params] if torch.is_grad_enabled() else then,
        then,
    )


class _Attributes(Aspect):
    """Attributes, compared by identity; by value where another object is there now, or one that can change in place.

    Args:
        owners: The name of each owner, its namespace, and what returns those attributes in it that count.
    """

    def __init__(self, owners: Sequence[tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]]):
        self._spaces = [own for _, own, _ in owners]
        selects = [select for *_, select in owners]
        then = [{key: kept(value) for key, value in select().items()} for select in selects]
        super().__init__([name for name, *_ in owners], lambda: list(map(call, selects)), self._now, then)

    def _look(self) -> None:
        held = [
            (own, key, own[key], copied)
            for own, then in zip(self._spaces, self._then, strict=True)
            for key, copied in then.items()
        ]
        self._owners, self._keys = [own for own, *_ in held], [key for _, key, *_ in held]
        self._objects = [value for *_, value, _ in held]
        mutable = [(value, copied) for *_, value, copied in held if value is not copied]
        self._mutable, self._copies = [value for value, _ in mutable], [copied for _, copied in mutable]
        super()._look()

    def _now(self) -> Any:
        same = all(map(is_, map(getitem, self._owners, self._keys), self._objects))
        # A new attribute shows in the length.
        return same and not any(map(differ, self._mutable, self._copies)) and list(map(len, self._spaces))

    def _change(self) -> str:
        for owner, now, then in zip(self._names, self._read(), self._then, strict=True):
            for key in dict.fromkeys((*then, *now)):
                one, other = now.get(key, _MISSING), then.get(key, _MISSING)
                if differ(one, other):
                    return _described(f"{key} of {owner}", other, one)
        return ""


class _Options(_Attributes):
    """The fields of a configuration, most of them immutable."""

    def _look(self) -> None:
        self.seen = list(map(kept, self._spaces[0].values()))

    def _now(self) -> Any:
        return list(self._spaces[0].values())


def _options(config: Any) -> Aspect:
    kind = _Attributes if "router_replay_action" in vars(config) else _Options  # that one holds tensors
    return kind([(type(config).__name__, vars(config), partial(_fields, config))])


class _Hooks(Aspect):
    """Hooks of modules, of parameters, and for all modules. Those of ``DistributedDataParallel`` come and go."""

    def __init__(self, modules: Mapping[torch.nn.Module, str], around: torch.nn.Module | None, parameters: bool):
        held = [
            (getattr(module, f"_{kind}"), f"hooks of {name}")
            for module, name in modules.items()
            if module is not around
            for kind in HOOK_KINDS
        ]
        held += [(hooks, "hooks for all modules") for hooks in _GLOBAL_HOOKS]
        self._dicts = [hooks for hooks, _ in held]
        trained = [
            (param, f"hooks of {key} of {name}")
            for module, name in (modules.items() if parameters else ())
            for key, param in module._parameters.items()
            if param is not None
        ]
        self._params = [param for param, _ in trained]
        names = [name for _, name in held] + [name for _, name in trained for _ in range(2)]
        super().__init__(names, lambda: list(map(_without_ddp, self._all())), self._now)

    def _all(self) -> list[Any]:
        # torch makes the dictionary of a parameter's hooks with the first one, and keeps it.
        of_params = ((each._backward_hooks, each._post_accumulate_grad_hooks) for each in self._params)
        return [*self._dicts, *chain.from_iterable(of_params)]

    def _change(self) -> str:
        for name, now, then in zip(self._names, self._all(), self._then, strict=True):
            if (now or then) and _without_ddp(now) != then:
                return name
        return ""

    def _look(self) -> None:
        self._filled = list(filter(None, self._all()))
        self.seen = [RemovableHandle.next_id, *map(dict, self._filled)]

    def _now(self) -> Any:
        return [RemovableHandle.next_id, *self._filled]  # which each hook that is registered raises


def _without_ddp(hooks: dict[int, Callable] | None) -> dict[int, Callable]:
    return {key: hook for key, hook in hooks.items() if not is_of_ddp(hook)} if hooks else {}


def contexts_in_force() -> list[Any]:
    """Return the values of ``CONTEXTS``, of ``_IN_TF32`` whether it is used, and autocast: whether and to what."""
    precision = torch._C._get_fp32_precision_getter
    of_all = precision("generic", "all")
    own = [precision(*operation) for operation in _IN_TF32.values()]
    in_tf32 = [(of_all if each == "none" else each) == "tf32" for each in own]
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    on = [is_enabled("cuda"), is_enabled("cpu")]
    types = [dtype(kind) for kind, enabled in zip(("cuda", "cpu"), on, strict=True) if enabled]
    return [*map(call, CONTEXTS.values()), *in_tf32, *on, *types]


# --------------------------------------------------------------------------------------------- attributes and options


@cache
def is_third_party(kind: Any) -> bool:
    """Whether ``kind`` is a class with a base that megatron-core, torch and TransformerEngine lack.

    Those of TransformerEngine and what derives from them set much of their own from pass to pass: they are not.
    """
    return not (
        _is_of_transformer_engine(kind)
        or all(f"{each.__module__}.".startswith(_KNOWN_PACKAGES) for each in kind.__mro__)
    )


@cache
def _is_of_transformer_engine(kind: Any) -> bool:
    return any(base.__module__.startswith("transformer_engine.") for base in kind.__mro__)


def _declared(
    module: torch.nn.Module, replaced: bool = False, volatile: "frozenset[tuple[int, str]]" = frozenset()
) -> dict[str, Any]:
    """Return the attributes of ``module`` that count.

    Those are ``forward`` unless it is ``replaced``, what was compiled, dropout probabilities, and in modules of
    megatron-core and torch scales, functions and the configuration. In third-party modules they are all that passes
    do not set.
    """
    own = vars(module)
    compared = {name: own[name] for name in ("forward", "_compiled_call_impl") if name in own and not replaced}
    kind: Any = type(module)
    if is_third_party(kind):
        others = (name for name in own if name not in _OF_ANY_MODULE and (id(module), name) not in volatile)
        return compared | {name: own[name] for name in others}
    of_te = _is_of_transformer_engine(kind)
    for name, value in own.items():
        if name[0] == "_" or name in _OF_ANY_MODULE:
            continue
        of_core = not of_te and (isinstance(value, (float, *_FUNCTIONS)) or "scale" in name or name in ("p", "config"))
        if of_core or "dropout" in name:
            compared[name] = value
    return compared


def _configurations(module: torch.nn.Module) -> list[Any]:
    held = [value for name, value in vars(module).items() if name == "router_replay" or _is_configuration(name, value)]
    return [value for value in held if hasattr(value, "__dict__")]


def _is_configuration(name: str, value: Any) -> bool:
    return name == "config" or type(value).__name__.endswith("Config")


def _fields(config: Any) -> dict[str, Any]:
    own = vars(config)
    if "router_replay_action" in own:
        return {name: own[name] for name in _ROUTING if name in own}
    return {name: own[name] for name in own if not name.startswith("cuda_graph") and name not in _OF_LOOPS}


class PassState:
    """What third-party modules keep in attributes from pass to pass, where no replay changes it.

    To be used as a context around the passes of a capture. After an exception attributes are as they were.

    Attributes:
        volatile: The attributes that passes set, by ``id`` of the module and name; they are not compared.

    Raises:
        UnsupportedError: at the end of the context, passes have left other data than they found.
    """

    def __init__(self, roots: Iterable[torch.nn.Module]):
        modules: dict[Any, None] = dict.fromkeys(module for root in roots for module in root.modules())
        self._before = [
            (module, name, value, kept(value))
            for module in modules
            if is_third_party(type(module))  # type: ignore[arg-type]
            for name, value in (_declared(module) | module._buffers).items()
        ]
        self.volatile: frozenset[tuple[int, str]] = frozenset()

    def __enter__(self) -> "PassState":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        changed = [each for each in self._before if differ(_value_of(*each[:2]), each[3])]
        left = [(module, name) for module, name, value, _ in changed if _is_data(value, _value_of(module, name))]
        self.volatile = frozenset((id(module), name) for module, name, *_ in changed)
        if kind is None and not left:
            return
        for module, name, value, copied in changed:
            _restore(vars(module) if name in vars(module) else module._buffers, name, value, copied)
        if kind is None:
            module, name = left[0]
            raise UnsupportedError(
                f"each forward pass changes {name} of {type(module).__name__}, and a replay would not: keep it in a "
                "buffer on the device and change that in place, or set --cuda-graph-modules to other parts of layers"
            )


def _value_of(module: torch.nn.Module, name: str) -> Any:
    return vars(module).get(name, module._buffers.get(name, _MISSING))


def _is_data(*values: Any) -> bool:
    kinds = (bool, int, float, complex, str, bytes, torch.Tensor, list, tuple, set, dict, deque)
    return all(isinstance(value, kinds) or _is_options(value) for value in values)


def _restore(own: dict[str, Any], name: str, value: Any, copied: Any) -> None:
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(copied)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(copied)
    own[name] = value


# -------------------------------------------------------------------------------------------------- copies of values


def kept(value: Any) -> Any:
    """Return what to compare ``value`` with later: a copy if it can change in place, else itself.

    Tensors on the device are not copied, as replays read them; a number in a tensor on the host becomes a part of an
    operation. What holds itself is not copied.
    """
    try:
        return _copied(value)
    except RecursionError:
        return value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if _is_number_on_host(value) else value
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    for kind in (list, set, deque):
        if isinstance(value, kind):
            return kind(map(_copied, value))
    if type(value) is tuple:
        copied = tuple(map(_copied, value))
        return value if all(map(is_, copied, value)) else copied
    if _is_options(value):
        copied = copy(value)
        vars(copied).update(_copied(vars(value)))
        return copied
    return value


def differ(now: Any, then: Any) -> bool:
    """Whether a value is neither the same as at capture nor equal. Of tensors only numbers on the host can be equal.

    To compare others would wait for the device, and graphs read the memory of the tensor that they were captured with.
    """
    if now is then:
        return False
    try:
        if isinstance(now, torch.Tensor) or isinstance(then, torch.Tensor):
            return not (_is_number_on_host(now) and _is_number_on_host(then) and torch.equal(now, then))
        if _is_options(then) and type(now) is type(then):
            now, then = vars(now), vars(then)
        if isinstance(now, dict) and isinstance(then, dict):
            # One with tensors in it may be a cache, of which graphs have read what was there.
            grows = any(isinstance(each, torch.Tensor) for each in then.values())
            fits = now.keys() >= then.keys() if grows else now.keys() == then.keys()
            return not fits or any(differ(now[key], each) for key, each in then.items())
        for kind in (list, tuple, deque):
            if isinstance(now, kind) and isinstance(then, kind):
                return len(now) != len(then) or any(map(differ, now, then))
        return bool(now != then)
    except Exception:  # arrays, of which each element is compared, or what holds itself
        return True


def _is_options(value: Any) -> bool:
    kind: Any = type(value)
    if isinstance(value, ModelParallelConfig) or kind.__name__.endswith("Config") or not hasattr(value, "__dict__"):
        return False  # configurations are aspects of their own
    return issubclass(kind, (types.SimpleNamespace, Namespace)) or (is_third_party(kind) and is_dataclass(kind))


def _is_number_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.ndim


def _described(name: str, then: Any, now: Any, show: Callable[[Any], str] = repr) -> str:
    plain = all(isinstance(value, (bool, int, float, str, torch.dtype)) for value in (then, now))
    return f"{name} ({show(then)} at capture, {show(now)} now)" if plain else name
