"""When the patch stays off, and which megatron-core it refuses."""

import pytest

from tests.unit_tests.fake_core import Sandbox, core_files, write

ORDERS = ["import torch, megatron.core", "import megatron.core", "import megatron.core.layers"]


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox.make(tmp_path)


class TestUntestedVersion:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("version", ["0.14.0", "0.19.3", "0.19.2rc0", "0.19.20", "0.20.0", "1.19.2"])
    def test_importing_it_is_refused_with_the_version_found_those_known_and_the_way_out(self, sandbox, version, order):
        write(sandbox.site, core_files(version))
        error = sandbox.error(order)
        assert error.startswith("ImportError: megatron-fsdp-cuda-graphs patches megatron-core 0.19.0, 0.19.1, 0.19.2 ")
        assert f"found {version} at {sandbox.site}/megatron/core/__init__.py" in error
        assert "Install megatron-core==0.19.2" in error
        assert "MEGATRON_FSDP_CUDA_GRAPHS=0" in error
        assert "MEGATRON_FSDP_CUDA_GRAPHS=untested to try it" in error

    @pytest.mark.parametrize("source", ["", "VERSION = compute()\n", None])
    def test_one_whose_version_cannot_be_read_is_refused(self, sandbox, source):
        file = sandbox.site / "megatron/core/package_info.py"
        file.unlink() if source is None else file.write_text(source)
        assert "found an unknown version at" in sandbox.error("import megatron.core")

    @pytest.mark.parametrize("order", ORDERS)
    def test_nothing_of_it_stays_imported(self, sandbox, order):
        write(sandbox.site, core_files("0.20.0"))
        code = f"""
            import sys
            for _ in range(2):
                try:
                    {order}
                except ImportError:
                    print([name for name in sys.modules if name.startswith("megatron.")])
        """
        assert sandbox.output(code) == "[]\n[]"

    def test_torch_and_other_packages_of_the_megatron_namespace_can_be_imported(self, sandbox):
        write(sandbox.site, {**core_files("0.20.0"), "megatron/energon/__init__.py": "SIDE = 1"})
        assert sandbox.output("import torch, megatron.energon; print(megatron.energon.SIDE)") == "1"

    def test_it_can_be_used_with_the_patch_off(self, sandbox):
        write(sandbox.site, core_files("0.20.0"))
        code = "import megatron.core.layers as l; print(hasattr(l.Linear, 'graphed'))"
        assert sandbox.output(code, MEGATRON_FSDP_CUDA_GRAPHS="0") == "False"

    @pytest.mark.parametrize("order", ORDERS)
    def test_it_is_patched_with_one_warning_where_the_user_asks_for_that(self, sandbox, order):
        write(sandbox.site, core_files("0.20.0"))
        code = f"{order}, megatron.core.layers as l\nprint(l.Linear.graphed)"
        done = sandbox.run("-W", "always", "-c", code, MEGATRON_FSDP_CUDA_GRAPHS="untested")
        assert done.stdout == "True\n", done.stderr
        assert done.stderr.count("UserWarning") == 1
        assert f"found 0.20.0 at {sandbox.site}/megatron/core/__init__.py" in done.stderr
        assert f"megatron_fsdp_cuda_graphs upstream {sandbox.site} --against" in done.stderr

    def test_a_tested_version_brings_no_warning_where_the_user_would_try_any(self, sandbox):
        done = sandbox.run("-c", "import megatron.core.layers", MEGATRON_FSDP_CUDA_GRAPHS="untested")
        assert (done.returncode, done.stderr) == (0, "")


class TestNameOfALaterVersion:
    """A class that a later megatron-core has under another name, beside a function of the old name."""

    PATCH = """
        from megatron_fsdp_cuda_graphs.overlay import extend

        _upstream = extend(__name__, {"Linear": "FirstLinear"})

        class Linear(_upstream.Linear):
            graphed = True
    """
    LATER = """
        def Linear(kind):
            return FirstLinear() if kind == 1 else SecondLinear()

        class FirstLinear:
            pass

        class SecondLinear:
            pass
    """

    @pytest.fixture
    def sandbox(self, sandbox):
        write(sandbox.patch, {"core/layers.py": self.PATCH})
        return sandbox

    def test_ours_takes_the_place_of_that_of_the_other_name(self, sandbox):
        write(sandbox.site, {"megatron/core/layers.py": self.LATER})
        code = """
            import inspect, pickle
            import megatron.core.layers as layers
            from megatron_fsdp_cuda_graphs.overlay import upstream
            made = layers.Linear(1)
            print(type(made) is layers.FirstLinear, made.graphed, hasattr(layers.Linear(2), "graphed"))
            print(layers.FirstLinear.__mro__[1] is upstream("megatron.core.layers").FirstLinear)
            print(type(pickle.loads(pickle.dumps(made))) is layers.FirstLinear, inspect.getfile(layers.FirstLinear))
        """
        file = sandbox.patch / "core/layers.py"
        assert sandbox.output(code) == f"True True False\nTrue\nTrue {file}"

    def test_without_it_ours_takes_the_place_of_that_of_its_own(self, sandbox):
        code = "import megatron.core.layers as l; print(l.Linear.graphed, hasattr(l, 'FirstLinear'))"
        assert sandbox.output(code) == "True False"


class TestCheckoutAheadOnThePath:
    def test_one_of_another_version_is_refused_although_the_installed_one_is_tested(self, sandbox):
        checkout = write(sandbox.folder / "Megatron-LM", core_files("0.20.0rc0"))
        error = sandbox.error("import megatron.core.layers", ahead=(checkout,))
        assert f"found 0.20.0rc0 at {checkout}/megatron/core/__init__.py" in error

    def test_one_of_the_tested_version_is_patched_although_the_installed_one_is_not_tested(self, sandbox):
        write(sandbox.site, core_files("0.20.0rc0"))
        files = core_files("0.19.2")
        checkout = write(
            sandbox.folder / "Megatron-LM", {**files, "megatron/core/layers.py": "class Linear: ahead = 1"}
        )
        code = "import megatron.core.layers as l; print(l.Linear.graphed, l.Linear.ahead)"
        assert sandbox.output(code, ahead=(checkout,)) == "True 1"

    def test_one_put_there_after_another_was_looked_at_is_judged_by_itself(self, sandbox):
        checkout = write(sandbox.folder / "Megatron-LM", core_files("0.20.0rc0"))
        code = f"""
            import sys, torch, importlib.util
            importlib.util.find_spec("megatron.core")
            sys.path.insert(0, {str(checkout)!r})
            import megatron.core
        """
        assert "found 0.20.0rc0" in sandbox.error(code)


class TestSwitch:
    def test_0_leaves_megatron_core_as_it_is(self, sandbox):
        code = "import megatron.core.layers as l; print(l.__file__)"
        expected = str(sandbox.site / "megatron/core/layers.py")
        assert sandbox.output(code, MEGATRON_FSDP_CUDA_GRAPHS="0") == expected

    def test_0_also_holds_for_a_call_of_activate(self, sandbox):
        code = "from megatron_fsdp_cuda_graphs import overlay; overlay.activate(); print(overlay.is_active())"
        assert sandbox.output(code, MEGATRON_FSDP_CUDA_GRAPHS="0") == "False"

    def test_with_the_patch_off_upstream_is_the_module_itself(self, sandbox):
        code = """
            import megatron.core.layers as layers
            from megatron_fsdp_cuda_graphs.overlay import upstream
            print(upstream("megatron.core.layers") is layers)
        """
        assert sandbox.output(code, MEGATRON_FSDP_CUDA_GRAPHS="0") == "True"

    def test_1_turns_it_on_as_no_value_does(self, sandbox):
        code = "import torch; from megatron_fsdp_cuda_graphs.overlay import is_active; print(is_active())"
        assert sandbox.output(code) == sandbox.output(code, MEGATRON_FSDP_CUDA_GRAPHS="1") == "True"

    @pytest.mark.parametrize("value", ["", "off", "false", "2"])
    def test_any_other_value_is_an_error_that_names_the_variable(self, sandbox, value):
        error = sandbox.error("import torch", MEGATRON_FSDP_CUDA_GRAPHS=value)
        assert error.startswith(f"ValueError: MEGATRON_FSDP_CUDA_GRAPHS={value}: set it to 1")


class TestActivate:
    def test_twice_registers_one_finder(self, sandbox):
        code = """
            import sys, torch
            from megatron_fsdp_cuda_graphs import overlay
            overlay.activate()
            print(sum(isinstance(finder, overlay.OverlayFinder) for finder in sys.meta_path))
        """
        assert sandbox.output(code) == "1"

    def test_after_a_replaced_module_was_imported_is_refused_naming_it(self, sandbox):
        write(sandbox.site, {"torch/__init__.py": ""})  # as with torch's autoload turned off
        code = "import megatron.core.layers; from megatron_fsdp_cuda_graphs import overlay; overlay.activate()"
        error = sandbox.error(code)
        assert error.startswith("ImportError: megatron.core.layers came from megatron-core before the patch was on.")

    def test_before_any_import_of_megatron_does_what_torch_autoload_would(self, sandbox):
        write(sandbox.site, {"torch/__init__.py": ""})
        code = """
            from megatron_fsdp_cuda_graphs import overlay
            overlay.activate()
            import megatron.core.layers as layers
            print(layers.Linear.graphed)
        """
        assert sandbox.output(code) == "True"


class TestSpawnedProcess:
    def test_a_class_of_a_patched_module_reaches_it_patched(self, sandbox):
        script = """
            import multiprocessing

            def child(cls, results):
                import megatron.core.layers as layers
                results.put((cls is layers.Linear, cls.graphed))

            if __name__ == "__main__":
                from megatron.core.layers import Linear
                context = multiprocessing.get_context("spawn")
                results = context.SimpleQueue()
                process = context.Process(target=child, args=(Linear, results))
                process.start()
                print(*results.get())
                process.join()
        """
        write(sandbox.folder, {"main.py": script})
        done = sandbox.run("main.py")
        assert done.stdout.strip() == "True True", done.stderr
