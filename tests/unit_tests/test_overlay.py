"""How a file of the patch takes the place of megatron-core's module, and reaches it."""

import shutil

import pytest

from tests.unit_tests.fake_core import Sandbox, write


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
    def test_the_patched_module_is_used_whichever_import_comes_first(self, sandbox, order):
        code = f"{order}\nimport megatron.core.layers, megatron.core.plain\n"
        code += "print(megatron.core.layers.Linear.graphed, megatron.core.plain.Linear is megatron.core.layers.Linear)"
        assert sandbox.output(code) == "True True"

    def test_a_module_that_the_tree_lacks_is_megatron_cores(self, sandbox):
        code = "import megatron.core.plain; print(megatron.core.plain.__file__)"
        assert sandbox.output(code) == str(sandbox.site / "megatron/core/plain.py")

    def test_a_module_that_only_the_tree_has_is_importable(self, sandbox):
        write(sandbox.patch, {"core/extra.py": "NEW = 3"})
        assert sandbox.output("from megatron.core.extra import NEW; print(NEW)") == "3"

    def test_a_package_that_only_the_tree_has_is_importable_with_its_modules(self, sandbox):
        write(sandbox.patch, {"core/graphs/__init__.py": "from .tape import NEW", "core/graphs/tape.py": "NEW = 3"})
        assert sandbox.output("import megatron.core.graphs as g; print(g.NEW, g.tape.__name__)") == (
            "3 megatron.core.graphs.tape"
        )

    def test_a_patched_module_runs_with_python_m(self, sandbox):
        write(sandbox.site, {"megatron/core/tool.py": "ANSWER = 42"})
        write(sandbox.patch, {"core/tool.py": "from megatron_fsdp_cuda_graphs.overlay import extend\n"
                              "print(extend(__name__).ANSWER)"})  # fmt: skip
        done = sandbox.run("-m", "megatron.core.tool")
        assert (done.returncode, done.stdout.strip()) == (0, "42"), done.stderr

    def test_the_tree_is_not_imported_from_the_repository_folder_itself(self, sandbox):
        checkout = write(sandbox.folder / "checkout", {"megatron/core/layers.py": "Linear = None"})
        code = "import megatron.core.layers as m; print(m.__file__)"
        assert sandbox.output(code, ahead=(checkout,)) == str(sandbox.patch / "core/layers.py")

    def test_a_file_of_the_tree_under_its_installed_name_is_refused(self, sandbox):
        error = sandbox.error("import megatron_fsdp_cuda_graphs.core.layers")
        assert "megatron_fsdp_cuda_graphs.core.layers is no megatron.* module" in error

    def test_a_failed_import_leaves_nothing_behind(self, sandbox):
        write(sandbox.site, {"megatron/core/layers.py": "raise RuntimeError('broken')"})
        code = """
            import sys
            for _ in range(2):
                try:
                    import megatron.core.layers
                except RuntimeError as error:
                    print(error, [name for name in sys.modules if "layers" in name])
        """
        assert sandbox.output(code) == "broken []\nbroken []"

    def test_turning_the_patch_on_imports_neither_megatron_nor_package_metadata(self, sandbox):
        code = "import sys, torch; print({'megatron', 'megatron.core', 'importlib.metadata'} & set(sys.modules))"
        assert sandbox.output(code) == "set()"

    def test_patched_modules_lists_replaced_and_added_modules_and_nothing_else(self, sandbox):
        write(
            sandbox.patch, {"core/graphs/__init__.py": "", "core/graphs/tape.py": "", "doctor.py": "", "own/a.py": ""}
        )
        code = "from megatron_fsdp_cuda_graphs.overlay import *; print(*patched_modules())"
        assert sandbox.output(code) == "megatron.core.graphs megatron.core.graphs.tape megatron.core.layers"


class TestExtend:
    def test_names_that_the_patch_does_not_define_are_megatron_cores(self, sandbox):
        code = """
            from megatron.core import layers
            from megatron_fsdp_cuda_graphs.overlay import upstream
            print(layers.Norm is upstream("megatron.core.layers").Norm, layers.Linear is layers._upstream.Linear)
        """
        assert sandbox.output(code) == "True False"

    def test_a_module_level_variable_is_the_live_one(self, sandbox):
        code = """
            from megatron.core import layers
            layers._upstream.LIMIT = 7
            print(layers.LIMIT, layers.limit())
        """
        assert sandbox.output(code) == "7 7"

    def test_star_import_gives_the_public_names_of_both(self, sandbox):
        assert sandbox.output("from megatron.core.layers import *; print(Linear.graphed, Norm, limit())").startswith(
            "True"
        )

    def test_star_import_follows_megatron_cores_own_list(self, sandbox):
        write(sandbox.site, {"megatron/core/layers.py": "__all__ = ['Linear']\nclass Linear: ...\nhidden = 1"})
        code = "from megatron.core.layers import *; print(Linear.graphed, 'hidden' in globals())"
        assert sandbox.output(code) == "True False"

    def test_dir_lists_the_names_of_both(self, sandbox):
        code = "from megatron.core import layers; print({'Norm', 'Linear', 'limit', '_upstream'} <= set(dir(layers)))"
        assert sandbox.output(code) == "True"

    def test_a_name_that_neither_has_is_an_attribute_error_with_the_public_name(self, sandbox):
        error = sandbox.error("from megatron.core import layers; layers.nothing")
        assert error == "AttributeError: module 'megatron.core.layers' has no attribute 'nothing'"

    def test_outside_the_patch_it_is_refused(self, sandbox):
        error = sandbox.error(
            "import megatron.core.plain, megatron_fsdp_cuda_graphs.overlay as o; o.extend('megatron.core.plain')"
        )
        assert "megatron.core.plain was not loaded through the patch" in error

    def test_reload_runs_the_patched_file_again_over_the_same_upstream(self, sandbox):
        code = """
            import importlib
            from megatron.core import layers
            norm, linear = layers.Norm, layers.Linear
            importlib.reload(layers)
            print(layers.Norm is norm, layers.Linear is linear, layers.Linear.graphed)
        """
        assert sandbox.output(code) == "True False True"


class TestCircularImport:
    """megatron-core's module imports a user of the patched module while the patched one is still being loaded."""

    def test_a_name_that_the_patch_leaves_alone_resolves_as_it_does_without_the_patch(self, sandbox):
        write(sandbox.site, {
            "megatron/core/layers.py": "class Norm: ...\nimport megatron.core.user\nclass Linear: ...",
            "megatron/core/user.py": "from megatron.core.layers import Norm",
        })  # fmt: skip
        code = "import megatron.core.layers as l, megatron.core.user as u; print(u.Norm is l.Norm, l.Linear.graphed)"
        assert sandbox.output(code) == "True True"

    def test_a_name_that_the_patch_replaces_is_refused(self, sandbox):
        write(sandbox.site, {
            "megatron/core/layers.py": "class Linear: ...\nimport megatron.core.user",
            "megatron/core/user.py": "from megatron.core.layers import Linear",
        })  # fmt: skip
        error = sandbox.error("import megatron.core.layers")
        assert "megatron.core.layers replaces Linear, but a module that it imports took megatron-core's own" in error

    def test_a_user_imported_by_the_patched_file_itself_is_refused_likewise(self, sandbox):
        source = (sandbox.patch / "core/layers.py").read_text()
        write(
            sandbox.patch,
            {"core/layers.py": source.replace("class Linear", "import megatron.core.plain\nclass Linear")},
        )
        assert "replaces Linear" in sandbox.error("import megatron.core.layers")


class TestUpstream:
    def test_it_is_loaded_once_by_many_threads(self, sandbox):
        write(
            sandbox.site,
            {"megatron/core/layers.py": "import time\nprint('loaded')\ntime.sleep(0.3)\nclass Linear: ..."},
        )
        code = """
            import torch
            from concurrent.futures import ThreadPoolExecutor
            from megatron_fsdp_cuda_graphs.overlay import upstream
            with ThreadPoolExecutor(8) as pool:
                found = set(pool.map(lambda _: upstream("megatron.core.layers").Linear, range(8)))
            print(len(found))
        """
        assert sandbox.output(code) == "loaded\n1"

    def test_of_a_module_that_the_tree_does_not_replace_is_the_module_itself(self, sandbox):
        code = """
            import megatron.core.plain
            from megatron_fsdp_cuda_graphs.overlay import upstream
            print(upstream("megatron.core.plain") is megatron.core.plain)
        """
        assert sandbox.output(code) == "True"

    def test_of_a_module_that_megatron_core_lacks_is_an_import_error(self, sandbox):
        write(sandbox.patch, {"core/extra.py": ""})
        code = "import torch; from megatron_fsdp_cuda_graphs.overlay import upstream; upstream('megatron.core.extra')"
        assert sandbox.error(code) == "ImportError: megatron-core has no module megatron.core.extra"

    def test_inspect_finds_the_source_of_its_functions(self, sandbox):
        code = "import inspect, megatron.core.layers as l; print(inspect.getsource(l.limit))"
        assert sandbox.output(code) == "def limit():\n    return LIMIT"

    def test_of_a_megatron_core_in_a_zip_archive(self, sandbox):
        archive = shutil.make_archive(str(sandbox.folder / "core"), "zip", sandbox.site)
        shutil.rmtree(sandbox.site)
        code = "import megatron.core.layers as l; print(l.Linear.graphed, l.Norm.__name__)"
        assert sandbox.output(code, ahead=(archive,)) == "True Norm"

    def test_of_a_megatron_core_that_a_finder_of_its_own_finds(self, sandbox):
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
            print(layers.Linear.graphed, layers._upstream.__file__)
        """
        assert sandbox.output(code) == f"True {sandbox.folder}/layers.py"


class TestPickle:
    @pytest.mark.parametrize("name", ["Linear", "Norm"])
    def test_classes_of_a_patched_module_travel_under_the_public_name(self, sandbox, name):
        dump = f"import pickle, megatron.core.layers as m; print(pickle.dumps(m.{name}(), 0).hex())"
        pickled = bytes.fromhex(sandbox.output(dump))
        assert b"megatron.core.layers" in pickled
        assert b"_upstream_" not in pickled
        load = f"import pickle; print(pickle.loads({pickled!r}).__class__)"
        assert sandbox.output(load) == f"<class 'megatron.core.layers.{name}'>"
