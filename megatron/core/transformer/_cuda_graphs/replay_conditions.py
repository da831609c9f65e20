"""Whether a replay still computes what the captured modules would: what their forward pass reads, compared.

A graph holds the operations of one forward pass. What decided which operations those were (training flags, hooks,
``forward`` functions, dropout probabilities and other attributes, parameters, autocast and other contexts) is read by
each eager pass, and by no replay. ``ReplayConditions`` records it at capture. The values of tensors are not part of it:
replays read those.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat, starmap
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from .attribute_reads import PARSED_FLAGS, AttributeReads, is_of_transformer_engine, options_of, training_globals
from .hooks import HOOK_KINDS, has_other_hooks, is_of_ddp
from .state_of_passes import differ, kept, tensors_in

# Compared by themselves, or set by Megatron and by us from step to step.
_NOT_COMPARED = frozenset(("training", "forward", "cuda_graphs", "current_microbatch", "replaying"))
# Asked of every module by those that capture; few have them.
_ASKED_AT_CAPTURE = frozenset(("calls_no_inner_modules", "need_backward_dw"))
_GLOBAL_HOOKS = [getattr(torch_module, f"_global_{kind}") for kind in HOOK_KINDS]
# Contexts and settings in which operators compute, or are watched, otherwise; each function is of C, and takes a
# fraction of a microsecond.
_CONTEXTS: dict[str, Callable[[], Any]] = {
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
    "the order of torch's attentions": torch._C._get_sdp_priority_order,
    "sums in half precision in attention of torch": torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    "cuDNN": torch._C._get_cudnn_enabled,
    "deterministic kernels of cuDNN": torch._C._get_cudnn_deterministic,
}
_IN_TF32 = {"TF32 in matrix products": ("cuda", "matmul"), "TF32 in convolutions": ("cuda", "conv")}
_BEFORE_AUTOCAST = len(_CONTEXTS) + len(_IN_TF32)


class _Aspect:
    """Things of one kind that are compared.

    Args:
        names: What errors call each thing.
        values: Returns the things there are now, always in the same order.
        then: Those at capture; by default what ``values`` returns.
        look: Returns less than ``values`` does, and faster, that differs if these do; by default it is the same.
        look_then: What that returned at capture; by default what it returns.
    """

    def __init__(
        self,
        names: Iterable[str],
        values: Callable[[], list[Any]],
        then: list[Any] | None = None,
        look: Callable[[], Any] | None = None,
        look_then: Any = None,
    ):
        self.names, self._values = list(names), values
        self._values_then = values() if then is None else then
        self.look = values if look is None else look
        if look_then is None:
            look_then = self._values_then if look is None else look()
        self.then = look_then

    def has_changed(self) -> bool:
        """Whether a thing is not what it was at capture."""
        try:
            return self.look() != self.then
        except Exception:  # an attribute is gone
            return True

    def change(self) -> str:
        """The name of the first thing that has changed."""
        try:
            now = self._values()
        except Exception:
            now = []
        pairs = zip(self.names, now, self._values_then, strict=False)
        return next((name for name, one, other in pairs if differ(one, other)), self.names[-1])


class ReplayConditions:
    """What the forward passes of a module read, at capture and now.

    To be made right after the capture, when hooks are in place and parameters are those that replays find. Modules that
    did not run in the capture are not compared: they run after replays as ever.

    Args:
        root: The captured module; what is inside of it belongs to it.
        hooks_run: Whether hooks of ``root`` itself run around replays.
        forward_replaced: Whether replays take the place of the ``forward`` of ``root`` by the time of a comparison.
        parameters: Whether parameters are compared, as they are not where others come and go.
        buffers: Whether buffers are compared, and where they and tensors in attributes are: not where an
            ``AddressGuard`` is checked in each pass.
        autocast: What ``autocast_in_force`` returned for the captured passes; by default what it returns now.
        quantized: Returns the tensors of FP8 that the graphs use, in lists; None without FP8.

    Attributes:
        hooked: The names of modules with third-party hooks that were recorded with them: no replay calls them.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        reads: AttributeReads,
        name: str = "",
        *,
        hooks_run: bool = True,
        forward_replaced: bool = False,
        parameters: bool = True,
        buffers: bool = False,
        autocast: Iterable[Any] | None = None,
        quantized: Callable[[], list[Any]] | None = None,
    ):
        self._modules = {
            module: ".".join(filter(None, (name, inner))) or type(module).__name__
            for inner, module in root.named_modules()
            if module is root or any(map(reads.ran, module.modules()))
        }
        inner = {module: own for module, own in self._modules.items() if module is not root}
        hooked = inner if hooks_run else self._modules
        inside = {} if torch_module._has_any_global_hook() else hooked  # as all modules would have hooks
        self.hooked = [own for module, own in inside.items() if has_other_hooks(module)]
        classes = [f"the class of {name}" for name in self._modules.values()]
        aspects = [_Aspect(classes, partial(_each, type, list(self._modules)))]
        compared = inner if forward_replaced else self._modules
        spaces = [module.__dict__ for module in compared]
        names = [f"forward of {own}" for own in compared.values()]
        aspects.append(_Aspect(names, lambda: list(map(dict.get, spaces, repeat("forward")))))
        compiled = partial(_each, attrgetter("_compiled_call_impl"), list(compared))
        aspects.append(_Aspect([f"what was compiled of {own}" for own in compared.values()], compiled))
        aspects += self._contents("the modules in", "_modules")
        aspects.append(_Hooks(hooked))
        if parameters:
            aspects += self._contents("the parameters of", "_parameters")
            aspects += self._parameters()
        if buffers:
            aspects += self._contents("the buffers of", "_buffers")
            aspects.append(self._places(reads))
        for_all = ["hooks for all modules"] * len(_GLOBAL_HOOKS)
        aspects.append(_Aspect(for_all, lambda: _GLOBAL_HOOKS, list(map(dict, _GLOBAL_HOOKS))))
        contexts = _contexts_in_force()
        if autocast is not None:
            contexts[_BEFORE_AUTOCAST:] = autocast
        names = [*_CONTEXTS, *_IN_TF32, *["autocast"] * 4]
        aspects.append(_Aspect(names, _contexts_in_force, contexts))
        if quantized is not None:
            tensors = quantized()
            names = ["statistics of FP8"] * 2 + ["weights quantized to FP8"] * (len(tensors) - 2)
            aspects.append(_Aspect(names, quantized, tensors, look=lambda: [list(map(id, own)) for own in quantized()]))
        aspects += self._attributes(reads)
        self._aspects = [aspect for aspect in aspects if aspect.names]
        self._looks, self._then = [aspect.look for aspect in self._aspects], [aspect.then for aspect in self._aspects]

    def _contents(self, what: str, kind: str) -> Iterator[_Aspect]:
        """Compare by identity what the modules have in their dictionary ``kind``."""
        contents = [(getattr(module, kind), f"{what} {name}") for module, name in self._modules.items()]
        places = [(own, key, name) for own, name in contents for key in own]
        yield self._same(places)
        dicts = [own for own, _ in contents]
        empty, filled = [own for own in dicts if not own], [own for own in dicts if own]
        yield _Aspect(
            [name for _, name in contents],
            lambda: list(map(len, dicts)),
            look=lambda: [any(empty), *map(len, filled)],  # most are empty and stay so
        )

    @staticmethod
    def _same(places: Sequence[tuple[dict[str, Any], str, str]]) -> _Aspect:
        """Compare by identity what dictionaries hold, each given with a key and a name."""
        owners, keys = [own for own, _, _ in places], [key for _, key, _ in places]
        then = list(map(dict.get, owners, keys))
        names, same = [name for *_, name in places], [True] * len(then)
        return _Aspect(names, lambda: list(map(is_, map(dict.get, owners, keys), then)), same)

    def _parameters(self) -> Iterator[_Aspect]:
        named = {
            param: f"{name}.{key}"
            for module, name in self._modules.items()
            for key, param in module._parameters.items()
            if param is not None
        }
        names = [f"requires_grad of {name}" for name in named.values()]
        yield _Aspect(names, partial(_each, attrgetter("requires_grad"), list(named)))
        # torch makes the dictionary of a parameter's hooks with the first one, and keeps it.
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks_of = attrgetter(kind)
            dicts = [hooks for hooks in map(hooks_of, named) if hooks]
            names = [f"hooks of {name}" for param, name in named.items() if hooks_of(param)]
            yield _Aspect(names, partial(list, dicts), list(map(dict, dicts)))
            others = {param: name for param, name in named.items() if not hooks_of(param)}
            without = partial(_each, hooks_of, list(others))
            names = [f"hooks of {name}" for name in others.values()]
            yield _Aspect(names, partial(_truth, without), look=partial(_any, without))

    def _places(self, reads: AttributeReads) -> _Aspect:
        """Compare where buffers are, and tensors in attributes that were read: ``.data`` can be put elsewhere."""
        held: dict[torch.Tensor, str] = {}
        for module, name in self._modules.items():
            own = vars(module)
            kind: Any = type(module)
            read: Iterable[str] = () if is_of_transformer_engine(kind) else reads.of.get(id(module), ())
            for key, value in ({each: own.get(each) for each in read} | module._buffers).items():
                if isinstance(value, torch.Tensor) and torch._C._has_storage(value):
                    held.setdefault(value, f"the memory of {key} of {name}")
        return _Aspect(held.values(), partial(_each, torch.Tensor.data_ptr, list(held)))

    def _attributes(self, reads: AttributeReads) -> Iterator[_Aspect]:
        spaces: list[tuple[str, dict[str, Any], set[str]]] = []
        absent: list[tuple[str, dict[str, Any], type, str]] = []  # read, and not there, or there in the class alone
        for module, name in self._modules.items():
            own = vars(module)
            kind: Any = type(module)
            read = reads.of.get(id(module), set()) - _NOT_COMPARED
            if is_of_transformer_engine(kind):  # sets much of its own from pass to pass
                read = {attribute for attribute in own if "dropout" in attribute}
            spaces.append((name, own, {"training"} | read & own.keys()))
            contents = {*own, *module._parameters, *module._buffers, *module._modules}
            others = {each for each in read - contents - _ASKED_AT_CAPTURE if not hasattr(torch.nn.Module, each)}
            absent += [(name, own, kind, each) for each in others]
        all_options = options_of(self._modules)
        for options in all_options:
            own = vars(options)
            read = {each for each in reads.of.get(id(options), ()) if not each.startswith("cuda_graph")}
            name = "the configuration" if "Config" in type(options).__name__ else type(options).__name__
            spaces.append((name, own, read & own.keys()))
            absent += [(name, own, type(options), each) for each in read - own.keys()]
        yield _Attributes(spaces)
        # Equal ones may have other attributes beside their fields.
        ids = set(map(id, all_options))
        held = [
            (own, each, f"{each} of {name}") for name, own, read in spaces for each in read if id(own.get(each)) in ids
        ]
        of_all = training_globals()
        if reads.of.get(id(of_all.get(PARSED_FLAGS))):
            held.append((of_all, PARSED_FLAGS, "the parsed flags"))
        yield self._same(held)
        yield self._tensors(reads)
        owners, attributes = [own for _, own, _, _ in absent], [attribute for *_, attribute in absent]
        of_classes = dict.fromkeys((kind, each) for _, _, kind, each in absent if hasattr(kind, each))
        of_classes |= dict.fromkeys((type(module), "forward") for module in self._modules)
        for kind, each in list(of_classes):  # a method may call those of base classes
            of_classes |= dict.fromkeys((base, each) for base in kind.__mro__ if each in vars(base))
        kinds, methods = [kind for kind, _ in of_classes], [attribute for _, attribute in of_classes]
        names = [f"{attribute} of {name}" for name, _, _, attribute in absent]
        names += [f"{attribute} of {kind.__name__}" for kind, attribute in of_classes]
        yield _Aspect(names, lambda: [*map(dict.get, owners, attributes), *map(getattr, kinds, methods)])

    def _tensors(self, reads: AttributeReads) -> _Aspect:
        """Compare by identity the tensors in lists, tuples and dictionaries that third-party modules hold.

        Dictionaries may get more: they may be caches, of which graphs have read what was there.
        """
        modules = {id(module): (vars(module), name) for module, name in self._modules.items()}
        held = [
            (*modules[owner], attribute, tensors)
            for (owner, attribute), tensors in reads.tensors.items()
            if owner in modules
        ]

        def now() -> list[dict[Any, int]]:
            found = []
            for own, _, attribute, tensors in held:
                value = own.get(attribute)
                inside = tensors_in(value)
                keys = tensors if isinstance(value, dict) else inside
                found.append({key: id(inside.get(key)) for key in keys})
            return found

        return _Aspect([f"{attribute} of {name}" for _, name, attribute, _ in held], now)

    def have_changed(self) -> bool:
        """Whether anything is not what it was at capture. It runs before each replay."""
        try:  # no function call per aspect beside its own
            if [look() for look in self._looks] == self._then:
                return False
        except Exception:  # see ``_Aspect.has_changed``
            return any(aspect.has_changed() for aspect in self._aspects)
        changed = any(aspect.has_changed() for aspect in self._aspects)
        if not changed:
            self._then = [aspect.then for aspect in self._aspects]
        return changed

    def changes(self) -> str:
        """Say what has changed, in a sentence."""
        changed = dict.fromkeys(aspect.change() for aspect in self._aspects if aspect.has_changed())
        return f"{', '.join(changed)} changed after capture, which a replay would not notice"

    def forget(self) -> None:
        """Let go of everything; nothing counts as changed any more."""
        self._aspects, self._looks, self._then, self._modules = [], [], [], {}


class _Attributes(_Aspect):
    """Attributes, compared by identity, and by value where another object is there now.

    ``==`` of lists and tuples compares the tensors that they hold by value, which waits for the device; see ``differ``.

    Args:
        spaces: For each owner its name, its namespace and the names of its attributes.
    """

    def __init__(self, spaces: Iterable[tuple[str, dict[str, Any], set[str]]]):
        # Of one name alone itemgetter makes no tuple.
        read = [(owner, own, [*names, *names][: max(2, len(names))]) for owner, own, names in spaces if names]
        self._namespaces = [own for _, own, _ in read]
        self._getters = [itemgetter(*names) for *_, names in read]

        def values() -> list[Any]:
            return [own.get(name) for _, own, names in read for name in names]

        super().__init__(
            [f"{name} of {owner}" for owner, _, names in read for name in names],
            values,
            list(map(kept, values())),
            look=self._are_same,
            look_then=True,
        )
        self._accept(values())

    def _accept(self, objects: list[Any]) -> None:
        self._objects = objects
        self._copied = [(one, copy) for one, copy in zip(objects, self._values_then, strict=True) if one is not copy]

    def _are_same(self) -> bool:
        now = chain.from_iterable(map(call, self._getters, self._namespaces))
        return all(map(is_, now, self._objects)) and not any(starmap(differ, self._copied))

    def has_changed(self) -> bool:
        try:
            if self._are_same():
                return False
        except KeyError:  # an attribute is gone
            return True
        now = self._values()
        if any(map(differ, now, self._values_then)):
            return True
        self._accept(now)
        return False


class _Hooks(_Aspect):
    """Hooks of modules, given with their names. Those of ``DistributedDataParallel`` may come and go."""

    def __init__(self, modules: Mapping[torch.nn.Module, str]):
        self._dicts = [getattr(module, f"_{kind}") for module in modules for kind in HOOK_KINDS]
        names = [f"hooks of {name}" for name in modules.values() for _ in HOOK_KINDS]
        super().__init__(names, partial(_each, _without_ddp, self._dicts), look=self._now, look_then=self._copied())

    def _copied(self) -> list[Any]:
        self._empty = [hooks for hooks in self._dicts if not hooks]  # most of them
        self._filled = [hooks for hooks in self._dicts if hooks]
        return [False, *map(dict, self._filled)]

    def _now(self) -> list[Any]:
        return [any(self._empty), *self._filled]

    def has_changed(self) -> bool:
        if self.look() == self.then:
            return False
        if self._values() != self._values_then:
            return True
        self.then = self._copied()
        return False


def _without_ddp(hooks: dict[int, Callable]) -> dict[int, Callable]:
    return {key: hook for key, hook in hooks.items() if not is_of_ddp(hook)}


def _each(look: Callable[[Any], Any], things: Iterable[Any]) -> list[Any]:
    return list(map(look, things))


def _any(values: Callable[[], list[Any]]) -> list[Any]:
    return [any(values())]


def _truth(values: Callable[[], list[Any]]) -> list[bool]:
    return list(map(bool, values()))


def autocast_in_force() -> list[Any]:
    """Whether autocast is on for CUDA and for the CPU, and to which types."""
    return _contexts_in_force()[_BEFORE_AUTOCAST:]


def _contexts_in_force() -> list[Any]:
    """The values of ``_CONTEXTS``, of ``_IN_TF32`` whether it is used, and of autocast; it runs before each replay."""
    precision = torch._C._get_fp32_precision_getter
    of_all = precision("generic", "all")
    own = [precision(*operation) for operation in _IN_TF32.values()]
    in_tf32 = [(of_all if each == "none" else each) == "tf32" for each in own]
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    on = [is_enabled("cuda"), is_enabled("cpu")]
    types = [dtype(kind) for kind, enabled in zip(("cuda", "cpu"), on, strict=True) if enabled]
    return [*map(call, _CONTEXTS.values()), *in_tf32, *on, *types]
