"""Test that files of the patch extend modules of megatron-core or add modules."""

from textwrap import dedent

import pytest

from tests.unit_tests.package.fake_core import LAYERS, PATCHED_LAYERS, Sandbox, write


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox.make(tmp_path)


class TestImport:
    @pytest.mark.parametrize(
        "order",
        [
            "import torch, megatron.core",
            "import megatron.core, torch",
            "import megatron.core.plain",
            "from megatron.core.plain import Linear",
        ],
    )
    def test_import_order_does_not_matter(self, sandbox, order):
        code = f"{order}\nimport megatron.core.layers, megatron.core.plain\n"
        code += "print(megatron.core.layers.Linear.graphed, megatron.core.plain.Linear is megatron.core.layers.Linear)"
        assert sandbox.output(code) == "True True"

    def test_added_package_is_importable(self, sandbox):
        write(sandbox.patch, {"core/graphs/__init__.py": "from .tape import NEW", "core/graphs/tape.py": "NEW = 3"})
        assert sandbox.output("import megatron.core.graphs as g; print(g.NEW, g.tape.__name__)") == (
            "3 megatron.core.graphs.tape"
        )

    def test_checkout_on_the_path_does_not_shadow_the_tree(self, sandbox):
        checkout = write(sandbox.folder / "checkout", {"megatron/core/layers.py": "Linear = None"})
        code = "import megatron.core.layers as m; print(m.Linear.graphed)"
        assert sandbox.output(code, ahead=(checkout,)) == "True"

    @pytest.mark.parametrize("inside", ["", "._overlay", "._overlay.d", "._overlay_d"])
    def test_files_of_the_tree_have_one_module_name(self, sandbox, inside):
        error = sandbox.error(f"import importlib; importlib.import_module('megatron_fsdp_cuda_graphs{inside}.core')")
        assert error.startswith("ModuleNotFoundError: No module named 'megatron_fsdp_cuda_graphs")

    def test_activation_imports_nothing(self, sandbox):
        code = "import sys, torch; print({'megatron', 'megatron.core', 'importlib.metadata'} & set(sys.modules))"
        assert sandbox.output(code) == "set()"

    def test_patched_modules_lists_the_tree(self, sandbox):
        write(
            sandbox.patch, {"core/graphs/__init__.py": "", "core/graphs/tape.py": "", "doctor.py": "", "own/a.py": ""}
        )
        code = "from megatron_fsdp_cuda_graphs.overlay import *; print(*patched_modules())"
        assert sandbox.output(code) == "megatron.core.graphs megatron.core.graphs.tape megatron.core.layers"


class TestExtend:
    def test_extended_module_has_the_file_of_megatron_core(self, sandbox):
        code = """
            import sys
            from megatron.core import layers
            print(layers.__file__, layers.__spec__.origin, type(layers).__name__)
            print([name for name in sys.modules if "layers" in name])
        """
        file = sandbox.site / "megatron/core/layers.py"
        assert sandbox.output(code) == f"{file} {file} module\n['megatron.core.layers']"

    def test_megatron_core_functions_use_patched_names(self, sandbox):
        write(sandbox.site, {"megatron/core/layers.py": "class Linear: ...\ndef make(): return Linear()"})
        assert sandbox.output("from megatron.core import layers; print(layers.make().graphed)") == "True"

    def test_relative_imports_of_both_files_resolve(self, sandbox):
        write(sandbox.site, {"megatron/core/layers.py": "from .utils import A\nclass Linear: ...",
                             "megatron/core/utils.py": "A = 1"})  # fmt: skip
        write(sandbox.patch, {"core/extra.py": "B = 2"})
        source = (sandbox.patch / "core/layers.py").read_text()
        write(sandbox.patch, {"core/layers.py": f"from .extra import B\n{source}"})
        assert sandbox.output("from megatron.core import layers; print(layers.A, layers.B)") == "1 2"

    @pytest.mark.parametrize("name", ["plain", "missing"])
    def test_extending_without_megatron_core_file_raises(self, sandbox, name):
        write(sandbox.patch, {"core/missing.py": PATCHED_LAYERS})
        code = f"import megatron.core.{name}, megatron_fsdp_cuda_graphs.overlay as o; o.extend('megatron.core.{name}')"
        assert f"megatron.core.{name} was not loaded through the patch" in sandbox.error(code)


class TestMonkeypatching:
    """Test that mocks in an extended module affect both megatron-core and the patch."""

    FILES = {
        "megatron/core/layers.py": """
            def warn(): return "warn"
            def validate(): return ["core", warn(), extra()]
            def parse(): return validate()
            def extra(): return "extra"
        """,
    }
    PATCH = """
        from megatron_fsdp_cuda_graphs.overlay import extend

        _upstream = extend(__name__)

        def validate():
            return ["patch", warn(), *_upstream.validate()]

        def extra():
            return "our " + _upstream.extra()
    """

    @pytest.fixture
    def layers(self, sandbox):
        write(sandbox.site, self.FILES)
        write(sandbox.patch, {"core/layers.py": self.PATCH})
        return sandbox

    def run(self, layers, code):
        return layers.output("from unittest import mock\nfrom megatron.core import layers\n" + dedent(code))

    def test_mocking_a_name_of_megatron_core(self, layers):
        code = """
            with mock.patch("megatron.core.layers.warn", lambda: "mocked"):
                print(*layers.parse())
            print(*layers.parse())
        """
        assert self.run(layers, code) == "patch mocked core mocked our extra\npatch warn core warn our extra"

    @pytest.mark.parametrize("name", ["validate", "extra"])
    def test_mocking_a_name_of_the_patch(self, layers, name):
        code = f"""
            ours = layers.{name}
            with mock.patch.object(layers, "{name}", lambda: ["mocked"]):
                print("mocked" in str(layers.parse()))
            print(layers.{name} is ours, *layers.parse())
        """
        assert self.run(layers, code) == "True\nTrue patch warn core warn our extra"


class TestCircularImport:
    """Test modules of megatron-core with circular imports."""

    def test_unreplaced_name_is_importable(self, sandbox):
        write(sandbox.site, {
            "megatron/core/layers.py": "class Norm: ...\nimport megatron.core.user\nclass Linear: ...",
            "megatron/core/user.py": "from megatron.core.layers import Norm",
        })  # fmt: skip
        code = "import megatron.core.layers as l, megatron.core.user as u; print(u.Norm is l.Norm, l.Linear.graphed)"
        assert sandbox.output(code) == "True True"

    def test_import_after_the_definition_gets_the_patch(self, sandbox):
        source = (sandbox.patch / "core/layers.py").read_text()
        write(sandbox.patch, {"core/layers.py": f"{dedent(source)}\nimport megatron.core.plain"})
        code = "import megatron.core.layers, megatron.core.plain as p; print(p.Linear.graphed)"
        assert sandbox.output(code) == "True"


class TestUpstream:
    def test_upstream_has_the_replaced_definitions(self, sandbox):
        code = """
            import torch
            from megatron_fsdp_cuda_graphs.overlay import upstream
            theirs = upstream("megatron.core.layers")
            import megatron.core.layers as layers
            print(theirs is layers._upstream, hasattr(theirs.Linear, "graphed"), theirs.Norm is layers.Norm)
        """
        assert sandbox.output(code) == "True False True"

    def test_upstream_works_while_the_patch_runs(self, sandbox):
        source = (sandbox.patch / "core/layers.py").read_text()
        user = """
            from megatron_fsdp_cuda_graphs.overlay import upstream
            Norm = upstream("megatron.core.layers").Norm
        """
        write(sandbox.patch, {"core/user.py": user, "core/layers.py": f"from megatron.core.user import Norm\n{source}"})
        assert sandbox.output("import megatron.core.layers as layers; print(layers.Linear.graphed)") == "True"

    def test_upstream_raises_while_megatron_core_file_runs(self, sandbox):
        write(sandbox.site, {"megatron/core/layers.py": f"import megatron.core.user\n{dedent(LAYERS)}"})
        user = "from megatron_fsdp_cuda_graphs.overlay import upstream\nupstream('megatron.core.layers')"
        write(sandbox.patch, {"core/user.py": user})
        error = sandbox.error("import megatron.core.layers")
        assert error.startswith("ImportError: megatron.core.layers is not fully imported yet")

    def test_megatron_core_of_an_editable_install(self, sandbox):
        sources = sandbox.folder / "sources"
        (sandbox.site / "megatron/core").rename(sources)
        (sources / "layers.py").rename(sandbox.folder / "layers.py")
        code = f"""
            import sys
            from importlib.util import spec_from_file_location

            class EditableFinder:
                places = {{
                    "megatron.core": {str(sources / "__init__.py")!r},
                    "megatron.core.layers": {str(sandbox.folder / "layers.py")!r},
                }}

                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    return spec_from_file_location(name, cls.places[name]) if name in cls.places else None

            sys.meta_path.append(EditableFinder)
            import megatron.core.layers as layers
            print(layers.Linear.graphed, layers.__file__)
        """
        assert sandbox.output(code) == f"True {sandbox.folder}/layers.py"


class TestOtherImportHooks:
    HOOKS = {
        "blocked module": "sys.modules['megatron.blocked'] = None",
        "legacy finder": "sys.meta_path.insert(0, object())",
        "finder with required arguments": """
            class Finder:
                def find_spec(self, name, path, target): return None

            sys.meta_path.insert(0, Finder())
        """,
        "loader with exec_module only": """
            from importlib.machinery import PathFinder

            class Rewriting:
                def create_module(self, spec): return None
                def exec_module(self, module): exec(open(module.__spec__.origin).read(), vars(module))

                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    if name == "megatron.core.layers":
                        spec = PathFinder.find_spec(name, path)
                        spec.loader = cls()
                        return spec

            sys.meta_path.insert(0, Rewriting)
        """,
        "wrapper of loaders": """
            import importlib.util

            class Wrapping:
                find_spec = lambda self, name, path=None, target=None: find(name)
                create_module = lambda self, spec: self.loader.create_module(spec)
                exec_module = lambda self, module: self.loader.exec_module(module)

            def find(name, busy=set()):
                if name != "megatron.core.layers" or name in busy:
                    return None
                busy.add(name)
                spec = importlib.util.find_spec(name)
                wrapper = Wrapping()
                wrapper.loader, spec.loader = spec.loader, wrapper
                return spec

            sys.meta_path.insert(0, Wrapping())
        """,
    }

    HOOKS["wrapper of loaders in front of the patch"] = f"import torch\n{dedent(HOOKS['wrapper of loaders'])}"

    @pytest.mark.parametrize("hook", HOOKS)
    def test_module_is_extended_once(self, sandbox, hook):
        write(sandbox.folder, {"hook.py": f"import sys\n{dedent(self.HOOKS[hook])}"})
        code = "import hook, megatron.core.layers as l; print(l.Linear.graphed, *map(str, l.Linear.mro()[1:]))"
        assert sandbox.output(code) == "True <class 'megatron.core.layers.Linear'> <class 'object'>"


class TestPickle:
    @pytest.mark.parametrize("name", ["Linear", "Norm"])
    def test_pickles_use_the_public_module_name(self, sandbox, name):
        dump = f"import pickle, megatron.core.layers as m; print(pickle.dumps(m.{name}(), 0).hex())"
        pickled = bytes.fromhex(sandbox.output(dump))
        assert b"megatron.core.layers" in pickled
        load = f"import pickle; print(pickle.loads({pickled!r}).__class__)"
        assert sandbox.output(load) == f"<class 'megatron.core.layers.{name}'>"
