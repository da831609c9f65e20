"""Snapshots of the state that CUDA graphs rely on, taken at capture and compared before replays.

A graph holds the operations of one pass and the addresses that they read and write. The operations depend on state that
eager passes read and replays do not: modes, hooks, ``forward`` functions, parameters, dropout probabilities,
configurations and torch's contexts. A ``Snapshot`` compares this state. It does not compare tensor values, because
replays read them. ``docs/limits.md`` lists the state that no snapshot covers.
"""

import math
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from itertools import chain, compress
from operator import call, getitem, is_, is_not, not_
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from megatron.core.token_bounds import token_bounds

from .errors import ArgumentTypeError, ChangedSinceCaptureError, UnsupportedError
from .hooks import HOOK_KINDS, is_of_ddp

# Not ``megatron`` as a whole: Megatron-Bridge's adapters, for example, are in ``megatron.bridge``.
_KNOWN_PACKAGES = (
    *("torch.", "megatron.core.", "megatron.training.", "megatron_fsdp_cuda_graphs.", "transformer_engine."),
    *("builtins.", "typing.", "abc."),
)
# Attributes that torch, megatron-core and this package set on any module.
_OF_ANY_MODULE = frozenset(
    (
        *vars(torch.nn.Module()),
        "_training_state",
        "forward",
        "cuda_graphs",
        "replaying",
        "current_microbatch",
        "is_first_microbatch",
        "input_tensor",  # set on later pipeline stages; an input of graphs
        "cuda_graph_manual_hooks",  # set after capture
        "backward_dw_wrapper",
        "cuda_graph_backward_dw_wrapper",
    )
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
_CONTAINERS = (list, set, deque, dict)
_DATA = (
    *(type(None), int, float, complex, str, bytes, Enum, np.generic, torch.dtype, torch.device),
    *(torch.Tensor, np.ndarray, tuple, frozenset, range, slice, *_CONTAINERS, *_FUNCTIONS),
)
# Configuration fields that training loops set between steps.
_OF_LOOPS = frozenset(
    ("timers", "no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "grad_scale_func")
)
_GLOBAL_HOOKS = [getattr(torch_module, f"_global_{kind}") for kind in HOOK_KINDS]
# C functions that each take a fraction of a microsecond.
CONTEXTS: dict[str, Callable[[], Any]] = {
    "anomaly detection": torch.is_anomaly_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "saved tensor hooks": partial(torch._C._autograd._top_saved_tensors_default_hooks, True),
    "TorchDispatchMode": torch._C._len_torch_dispatch_stack,
    "TorchFunctionMode": torch._C._len_torch_function_stack,
    "default dtype": torch._C.get_default_dtype,
    "BLAS library": torch._C._get_blas_preferred_backend,
    "reduced-precision bf16 reductions": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    "reduced-precision fp16 reductions": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "fp16 accumulation": torch._C._get_cublas_allow_fp16_accumulation,
    "flash attention": torch._C._get_flash_sdp_enabled,
    "memory-efficient attention": torch._C._get_mem_efficient_sdp_enabled,
    "math attention": torch._C._get_math_sdp_enabled,
    "cuDNN attention": torch._C._get_cudnn_sdp_enabled,
    "deterministic cuDNN kernels": torch._C._get_cudnn_deterministic,
    "whether RerunStateMachine enforces --moe-alltoall-capacity-factor": partial(getattr, token_bounds, "in_force"),
}
_IN_TF32 = {"TF32 matrix products": ("cuda", "matmul"), "TF32 convolutions": ("cuda", "conv")}


class Replays:
    """Process-wide switch for replays.

    Attributes:
        suspended_by: The reason why all passes run eagerly; empty if they may replay.
    """

    suspended_by = ""

    @contextmanager
    def suspended(self, reason: str) -> Iterator[None]:
        """Context manager that makes all passes run eagerly; logs and errors include ``reason``."""
        before, self.suspended_by = self.suspended_by, reason
        try:
            yield
        finally:
            self.suspended_by = before


replays = Replays()


class Aspect:
    """One kind of value that a snapshot compares, for example addresses or hooks.

    Args:
        names: The name of each value in messages.
        read: Returns the current values, always in the same order.
        glance: Returns a cheap value that changes whenever the result of ``read`` does; by default ``read`` itself.
        then: The captured values; by default the result of ``read`` at construction.
        show: Formats an old or new value for messages; None to omit both.
    """

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[], Sequence[Any]],
        glance: Callable[[], Any] | None = None,
        then: Sequence[Any] | None = None,
        show: Callable[[Any], str] | None = repr,
    ):
        self.names, self._read, self._show = list(names), read, show
        self._then = read() if then is None else then
        self.glance = glance or read
        self.seen = glance() if glance else self._then

    def changed(self) -> bool:
        """Return whether a value has changed since capture; if not, store the result of ``glance()`` as ``seen``.

        Call this only if ``glance()`` differs from ``seen``.
        """
        if self._read() != self._then and self.change():  # without a Python call per value if nothing has changed
            return True
        self.seen = self.glance()
        return False

    def change(self) -> str:
        """Return the name of the first changed value, with the old and new value; an empty string without changes."""
        try:
            now = self._read()
        except Exception:  # an object is gone, or a torch mode intercepts the comparison
            return self.names[0]
        entries = zip(self.names, now, self._then, strict=False)
        for name, one, other in compress(entries, map(is_not, now, self._then)):  # skips identical objects in C
            if _differ(one, other):
                plain = all(isinstance(value, (bool, int, float, str, torch.dtype)) for value in (other, one))
                values = f" ({self._show(other)} at capture, {self._show(one)} now)" if self._show and plain else ""
                return name + values
        return "" if len(now) == len(self._then) else f"the number of values (first: {self.names[0]})"


class _Values(Aspect):
    """Values compared by identity, then by equality; device tensors are never compared by value."""

    def __init__(self, names: Iterable[str], read: Callable[[], Sequence[Any]]):
        then = list(map(_copied, read()))
        super().__init__(names, read, lambda: all(map(is_, read(), then)) or math.nan, then)  # nan is never equal

    def changed(self) -> bool:
        return bool(self.change())


class Snapshot:
    """The state that graphs rely on, recorded at construction.

    Args:
        advice: What to do if the state has changed; each error message ends with it.
    """

    def __init__(self, advice: str, *aspects: Aspect):
        self._advice, self._aspects = advice, aspects

    def changed(self) -> bool:
        """Return whether a replay might differ from an eager pass. Called before each replay."""
        if replays.suspended_by:
            return True
        try:
            for aspect in self._aspects:
                if aspect.glance() != aspect.seen and aspect.changed():
                    return True
        except Exception:  # a value is gone, or its comparison has no truth value
            return True
        return False

    def reason(self) -> str:
        """Return why a pass must not replay: the changes and the remedy, or why replays are suspended."""
        if replays.suspended_by:
            return replays.suspended_by
        changes = dict.fromkeys(filter(None, (aspect.change() for aspect in self._aspects)))
        return f"changed since capture: {', '.join(changes)}; {self._advice}"

    def check(self) -> None:
        """Raise ChangedSinceCaptureError if ``changed``. Call this before passes that cannot run eagerly."""
        if self.changed():
            raise ChangedSinceCaptureError(self.reason())

    def forget(self) -> None:
        """Drop all references; ``changed`` then returns False."""
        self._aspects = ()


def identities(names: Iterable[str], objects: Callable[[], Iterable[Any]]) -> Aspect:
    """Return an aspect that compares objects by identity and keeps the captured ones alive."""
    captured = list(objects())
    return Aspect(names, lambda: list(map(is_, objects(), captured)), show=None)


def addresses(
    names: Iterable[str], tensors: Callable[[], Sequence[torch.Tensor | None]] | Sequence[torch.Tensor | None]
) -> Aspect:
    """Return an aspect that compares the addresses of tensors (see ``address_of``).

    Args:
        tensors: The tensors, or a function that returns the current ones if the objects may be replaced.
    """
    current: Any = tensors if callable(tensors) else lambda: tensors

    def read() -> list[int]:
        try:
            return [tensor.data_ptr() for tensor in current()]  # without a Python call per tensor
        except (AttributeError, RuntimeError):
            return list(map(address_of, current()))

    return Aspect(names, read, show=hex)


def address_of(tensor: torch.Tensor | None) -> int:
    """Return the address of ``tensor``; 0 for None, and for quantized tensors that wrap others."""
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except RuntimeError:
        return 0


class InputSignature:
    """Shapes, dtypes and ``requires_grad`` of the inputs that a callable was captured with.

    Args:
        name_of: Returns the name of the input with a given index, for errors.
        advice: Ending of errors about a different shape or dtype.
    """

    def __init__(self, owner: str, tensors: Sequence[torch.Tensor], name_of: Callable[[int], str], advice: str = ""):
        self._owner, self.name_of, self._advice = owner, name_of, advice
        self._expected = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]

    def __len__(self) -> int:
        return len(self._expected)

    def rename(self, owner: str, name_of: Callable[[int], str], advice: str) -> None:
        """Set the name of the callable, the names of its inputs and the advice in errors."""
        self._owner, self.name_of, self._advice = owner, name_of, advice

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """Return whether the number of ``inputs`` matches and ``check`` would accept them."""
        if len(inputs) != len(self._expected):
            return False
        for given, (shape, dtype, requires_grad) in zip(inputs, self._expected):  # noqa: B905
            if not isinstance(given, torch.Tensor) or given.shape != shape or given.dtype != dtype:
                return False
            if given.requires_grad and not requires_grad and torch.is_grad_enabled():
                return False
        return True

    def check(self, inputs: Sequence[Any]) -> None:
        """Reject ``inputs`` that differ from the captured ones; their number must match.

        Raises:
            ArgumentTypeError: An input is not a tensor.
            ValueError: An input has a different shape or dtype, or requires grad but did not at capture.
        """
        if self.accepts(inputs):
            return
        for index, (given, (shape, dtype, requires_grad)) in enumerate(zip(inputs, self._expected, strict=True)):
            if not isinstance(given, torch.Tensor):
                raise ArgumentTypeError(
                    f"{self._owner}: {self.name_of(index)} must be a tensor for a CUDA graph, got {given!r}"
                )
            if given.shape != shape or given.dtype != dtype:
                raise ValueError(
                    f"{self._owner} was captured with {self.name_of(index)} of {tuple(shape)} {dtype}, but called "
                    f"with {tuple(given.shape)} {given.dtype}{self._advice}"
                )
            if given.requires_grad and not requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{self._owner}: {self.name_of(index)} requires grad, but did not at capture: detach it, or "
                    "capture with an input that requires grad"
                )


def named(root: torch.nn.Module, name: str = "", parts: Iterable[torch.nn.Module] | None = None) -> dict[Any, str]:
    """Return the names of ``root`` and its submodules in messages, keyed by module.

    Args:
        name: Name of ``root``, and prefix of the other names; if empty, the class of ``root``, and no prefix.
        parts: The submodules to include, each with its own submodules; None for all.
    """
    held = None if parts is None else {inner for part in parts for inner in part.modules()}
    return {
        module: ".".join(filter(None, (name, inner))) or type(module).__name__
        for inner, module in root.named_modules()
        if held is None or module is root or module in held
    }


_Place = tuple[dict[str, Any], str, str]  # a dict, a key, and the name of that entry


def _reader(places: Iterable[_Place]) -> Callable[[], list[Any]]:
    """Return a function that returns the current values of the dict entries ``places``, None for missing entries."""
    owners, keys = [own for own, _, _ in places], [key for _, key, _ in places]

    def read() -> list[Any]:
        try:
            return list(map(getitem, owners, keys))
        except KeyError:
            return list(map(dict.get, owners, keys))

    return read


def _names(places: Iterable[_Place], prefix: str = "") -> list[str]:
    return [prefix + name for *_, name in places]


def _filled(entries: dict[str, Any], name: str) -> list[_Place]:
    return [(entries, key, f"{key} of {name}") for key, value in entries.items() if value is not None]


def module_aspects(
    modules: Mapping[torch.nn.Module, str],
    *,
    around: torch.nn.Module | None = None,
    replaced: torch.nn.Module | None = None,
) -> list[Aspect]:
    """Return aspects for the state that passes of ``modules`` read, including torch's contexts.

    Args:
        modules: The modules that ran in the capture, with their names.
        around: The module whose own hooks run around replays.
        replaced: The module whose ``forward`` replays replace.
    """
    parts: list[_Place] = []
    places: list[_Place] = []
    trained: list[_Place] = []
    buffers: list[_Place] = []
    configs: dict[int, Any] = {}
    for module, name in modules.items():
        trained += _filled(module._parameters, name)
        buffers += _filled(module._buffers, name)  # some modules create a buffer only when they first need it
        parts += [(vars(module), "training", f"training of {name}")]
        parts += [(module._modules, key, f"{key} of {name}") for key in module._modules]
        places += [(vars(module), key, f"{key} of {name}") for key in _attributes(module)]
        for key, value in vars(module).items():
            if (key == "config" or type(value).__name__.endswith("Config")) and hasattr(value, "__dict__"):
                configs[id(value)] = value
    by_identity = [_is_on_device(entries.get(key)) for entries, key, _ in places]
    tensors = [*compress(places, by_identity), *trained]
    others = list(compress(places, map(not_, by_identity)))
    own = {name: vars(module) for module, name in modules.items() if module is not replaced}
    params = _reader(trained)()
    requires_grad = [param.requires_grad for param in params]
    aspects = [
        Aspect([*CONTEXTS, *_IN_TF32, *["autocast"] * 4], contexts_in_force),
        Aspect(_names(parts), _reader(parts)),
        _Values(_names(others), _reader(others)),
        Aspect(
            [f"forward of {name}" for name in own],
            lambda: [each.get("forward") for each in own.values()],
            glance=lambda: [(name, each["forward"]) for name, each in own.items() if "forward" in each],
        ),
        *map(_options, configs.values()),
        identities(_names(tensors), _reader(tensors)),
        addresses(_names(buffers, "the address of "), _reader(buffers)),
        _hooks(modules, around, params, _names(trained)),
        Aspect(
            _names(trained, "requires_grad of "),
            lambda: [param.requires_grad for param in params] if torch.is_grad_enabled() else requires_grad,
        ),
    ]
    return [aspect for aspect in aspects if aspect.names]


def memory_aspects(modules: Mapping[torch.nn.Module, str], *, main_grads: bool) -> list[Aspect]:
    """Return aspects for the addresses of parameters and, with ``main_grads``, of their main gradients."""
    params = [place for module, name in modules.items() for place in _filled(module._parameters, name)]
    written = [place for place in params if main_grads and getattr(place[0][place[1]], "main_grad", None) is not None]
    trained = _reader(written)
    return [
        addresses(_names(params, "the address of "), _reader(params)),
        addresses(
            _names(written, "the address of the main gradient of "),
            lambda: [getattr(param, "main_grad", None) for param in trained()],
        ),
    ]


def quantized_aspect(tensors: Callable[[], list[list[torch.Tensor]]]) -> Aspect:
    """Return an aspect that compares ``RecordedQuantization.tensors`` by identity."""
    names = ["FP8 statistics"] * 2 + ["weights quantized to FP8"] * (len(tensors()) - 2)
    captured = list(map(list, tensors()))
    return Aspect(
        names,
        lambda: [
            len(now) == len(then) and all(map(is_, now, then)) for now, then in zip(tensors(), captured, strict=True)
        ],
        show=None,
    )


def _hooks(
    modules: Mapping[torch.nn.Module, str], around: torch.nn.Module | None, params: Sequence[Any], names: Sequence[str]
) -> Aspect:
    """Return an aspect that compares module, parameter and global hooks, except ``DistributedDataParallel``'s."""
    held = [
        (f"hooks of {name}", getattr(module, f"_{kind}"))
        for module, name in modules.items()
        if module is not around
        for kind in HOOK_KINDS
    ]
    held += [("hooks of all modules", hooks) for hooks in _GLOBAL_HOOKS]
    none: dict[int, Callable] = {}

    def current() -> list[dict[int, Callable] | None]:
        # torch creates a parameter's dict of hooks with the first hook, and keeps it.
        of_params = ((param._backward_hooks, param._post_accumulate_grad_hooks) for param in params)
        return [*(hooks for _, hooks in held), *chain.from_iterable(of_params)]

    def read() -> list[dict[int, Callable]]:
        return [
            {key: hook for key, hook in hooks.items() if not is_of_ddp(hook)} if hooks else none for hooks in current()
        ]

    filled = list(filter(None, current()))
    every = [*(name for name, _ in held), *(f"hooks of {name}" for name in names for _ in range(2))]
    # Registering a hook raises the id; removing one shortens a dict.
    return Aspect(every, read, glance=lambda: [RemovableHandle.next_id, *map(len, filled)])


def contexts_in_force() -> list[Any]:
    """Return the current values of torch's contexts (``CONTEXTS``), the TF32 settings and the autocast state."""
    precision = torch._C._get_fp32_precision_getter
    of_all = precision("generic", "all")
    own = [precision(*operation) for operation in _IN_TF32.values()]
    in_tf32 = [(of_all if each == "none" else each) == "tf32" for each in own]
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    on = [is_enabled("cuda"), is_enabled("cpu")]
    types = [dtype(kind) for kind, enabled in zip(("cuda", "cpu"), on, strict=True) if enabled]
    return [*map(call, CONTEXTS.values()), *in_tf32, *on, *types]


@cache
def is_third_party(kind: type) -> bool:
    """Return whether ``kind`` or a base class is defined outside megatron-core, torch and TransformerEngine.

    Subclasses of TransformerEngine's modules do not count: they set many attributes in every pass.
    """
    return not (
        _is_of_transformer_engine(kind)
        or all(f"{each.__module__}.".startswith(_KNOWN_PACKAGES) for each in kind.__mro__)
    )


@cache
def has_third_party_forward(kind: type) -> bool:
    """Return whether ``kind.forward`` is defined outside megatron-core, torch and TransformerEngine."""
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    return not f"{owner.__module__}.".startswith(_KNOWN_PACKAGES)


@cache
def _is_of_transformer_engine(kind: type) -> bool:
    return any(base.__module__.startswith("transformer_engine.") for base in kind.__mro__)


def _attributes(module: torch.nn.Module) -> list[str]:
    """Return the names of the attributes of ``module`` that passes read.

    For third-party modules, these are all attributes with data or functions; for modules of megatron-core and torch,
    dropout probabilities, scales, functions and the configuration; for TransformerEngine's, dropout probabilities.
    """
    own = vars(module).items()
    kind: Any = type(module)
    if is_third_party(kind):
        return [
            name for name, value in own if name not in _OF_ANY_MODULE and (isinstance(value, _DATA) or name == "config")
        ]
    public = [(name, value) for name, value in own if name[0] != "_" and name not in _OF_ANY_MODULE]
    if _is_of_transformer_engine(kind):
        return [name for name, _ in public if "dropout" in name]
    return [
        name
        for name, value in public
        if isinstance(value, (float, *_FUNCTIONS)) or "scale" in name or "dropout" in name or name in ("p", "config")
    ]


def _options(config: Any) -> Aspect:
    """Return an aspect that compares the fields of a configuration."""
    own = vars(config)
    read = [key for key in own if not key.startswith("cuda_graph") and key not in _OF_LOOPS]
    places = [(own, key, f"{key} of {type(config).__name__}") for key in read]
    return Aspect(_names(places), _reader(places), glance=lambda: list(own.values()))


@contextmanager
def refuse_changed_attributes(roots: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Context manager that raises UnsupportedError if a pass changes attributes of third-party modules.

    Replays would not change them. After an exception, all attributes are restored, including the contents of containers
    and scalar host tensors.
    """
    modules: dict[Any, None] = dict.fromkeys(module for root in roots for module in root.modules())
    before = [
        (own, key, own[key], _copied(own[key]), type(module).__name__)
        for module in modules
        if is_third_party(type(module))  # type: ignore[arg-type]
        for own, keys in ((vars(module), _attributes(module)), (module._buffers, module._buffers))
        for key in keys
        if own[key] is not None  # not set up yet
    ]
    try:
        yield
        for own, key, _, copied, kind in before:
            if _differ(own.get(key), copied):
                raise UnsupportedError(
                    f"each forward pass changes {key} of {kind}, but a replay would not: store the data in a device "
                    "buffer and update it in place, set function-valued attributes once before the capture, or capture "
                    "other parts of layers (--cuda-graph-modules)"
                )
    except BaseException:
        for own, key, value, copied, _ in before:
            if _differ(value, copied):
                _restore(value, copied)
            own[key] = value
        raise


def _restore(value: Any, copied: Any) -> None:
    """Restore ``value`` in place from its copy ``copied``."""
    if isinstance(value, torch.Tensor):
        value.data.copy_(copied)
    elif isinstance(value, tuple):
        for each, then in zip(value, copied, strict=True):
            if each is not then:
                _restore(each, then)
    else:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(copied)


def _copied(value: Any) -> Any:
    """Return ``value`` for later comparison, copied if it can change in place.

    Scalar host tensors are copied, because their values become arguments of operations. Other tensors, arrays, dicts
    with tensors (they may be growing caches) and containers that contain themselves are not copied.
    """
    try:
        return _copy(value)
    except RecursionError:
        return value


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if _is_on_device(value) else value.clone()
    if isinstance(value, dict):
        cache = any(isinstance(each, torch.Tensor) for each in value.values())
        return value if cache else {key: _copy(each) for key, each in value.items()}
    if type(value) is tuple:
        copied = tuple(map(_copy, value))
        return value if all(map(is_, copied, value)) else copied
    kind = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    return value if kind is None else kind(map(_copy, value))


def _differ(now: Any, then: Any) -> bool:
    """Return whether values differ. Distinct device tensors count as different: a comparison would synchronize."""
    if now is then:
        return False
    try:
        if _is_on_device(now) or _is_on_device(then):
            return True
        if isinstance(now, dict) and isinstance(then, dict):
            return now.keys() != then.keys() or any(_differ(now[key], each) for key, each in then.items())
        for kind in (list, tuple, deque):
            if isinstance(now, kind) and isinstance(then, kind):
                return len(now) != len(then) or any(map(_differ, now, then))
        return bool(now != then)
    except Exception:  # arrays, for example, have no truth value
        return True


def _is_on_device(value: Any) -> bool:
    """Return whether ``value`` is a tensor on a device, or a host tensor that is not a scalar."""
    return isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.ndim > 0)
