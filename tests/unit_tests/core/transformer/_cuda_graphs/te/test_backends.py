"""backends: which engine captures."""

import sys
from types import ModuleType

import pytest

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.te.backends import ENGINE_VARIABLE, choose_backend, transformer_engine


def capture_with_hooks(modules, sample_args, capture_time_hooks=None):
    """As TransformerEngine 2.19's."""


def capture_without_hooks(modules, sample_args):
    """As TransformerEngine 2.18's."""


@pytest.fixture(autouse=True)
def _default_choice(monkeypatch):
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)


@pytest.fixture
def choose(monkeypatch):
    """Sets the environment variable."""
    return lambda choice: monkeypatch.setenv(ENGINE_VARIABLE, choice)


@pytest.fixture
def installed(monkeypatch):
    """Installs a TransformerEngine with the given ``make_graphed_callables``; with None there is none."""

    def install(capture):
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        graph = ModuleType("transformer_engine.pytorch.graph")
        graph.__dict__["make_graphed_callables"] = capture
        monkeypatch.setitem(sys.modules, graph.__name__, graph if capture else None)

    return install


def test_the_variable_has_its_documented_name():
    assert ENGINE_VARIABLE == "MEGATRON_CUDA_GRAPH_ENGINE"


# --------------------------------------------------------------------------------------------------------- native


@pytest.mark.parametrize("choice", [None, "native"])
@pytest.mark.parametrize("capture", [None, capture_with_hooks, capture_without_hooks])
def test_it_is_ours_by_default_whatever_is_installed(installed, choose, choice, capture):
    installed(capture)
    if choice:
        choose(choice)
    engine = choose_backend(needs_hooks=True)
    assert (engine.name, engine.capture) == ("native", make_graphed_callables)
    assert engine.takes_hooks


# --------------------------------------------------------------------------------------------- transformer_engine


def test_transformer_engine_is_its_engine(installed, choose):
    installed(capture_with_hooks)
    choose("transformer_engine")
    assert choose_backend(needs_hooks=True).capture is capture_with_hooks


def test_transformer_engine_is_refused_where_there_is_none(installed, choose):
    installed(None)
    choose("transformer_engine")
    with pytest.raises(RuntimeError, match=f"{ENGINE_VARIABLE}=transformer_engine needs TransformerEngine, which"):
        choose_backend()


def test_a_transformer_engine_without_hooks_is_refused_where_hooks_are_needed(installed, choose):
    installed(capture_without_hooks)
    choose("transformer_engine")
    with pytest.raises(RuntimeError, match=r"needs TransformerEngine 2\.19 or newer.*capture_time_hooks"):
        choose_backend(needs_hooks=True)


def test_a_transformer_engine_without_hooks_serves_where_none_are_needed(installed, choose):
    installed(capture_without_hooks)
    choose("transformer_engine")
    engine = choose_backend()
    assert engine.capture is capture_without_hooks
    assert not engine.takes_hooks


def test_a_transformer_engine_that_fails_to_import_is_none(monkeypatch):
    class FailsToImport:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("transformer_engine"):
                raise OSError("libcuda.so.1: cannot open shared object file")

    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [FailsToImport(), *sys.meta_path])
    assert transformer_engine() is None


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("choice", ["", "te", "Native", "auto"])
def test_another_value_is_refused_with_the_values_there_are(choose, choice):
    choose(choice)
    with pytest.raises(ValueError, match=f"{ENGINE_VARIABLE} must be native or transformer_engine, got '{choice}'"):
        choose_backend()


def test_an_engine_knows_the_parameters_of_its_function(installed, choose):
    installed(capture_with_hooks)
    choose("transformer_engine")
    assert choose_backend().parameters == {"modules", "sample_args", "capture_time_hooks"}
