"""Test which versions of megatron-core are patched, and the settings of ``MEGATRON_FSDP_CUDA_GRAPHS``."""

from textwrap import dedent

import pytest

from tests.unit_tests.package.fake_core import LAYERS, Sandbox, core_files, write

ORDERS = ["import torch, megatron.core", "import megatron.core", "import megatron.core.layers"]
# Prints whether the patch is on and whether it changed a module.
UNPATCHED = (
    "import torch, megatron.core.layers as l; from megatron_fsdp_cuda_graphs import overlay; "
    "print(overlay.is_active(), hasattr(l.Linear, 'graphed'))"
)


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox.make(tmp_path)


class TestUntestedVersion:
    @pytest.mark.parametrize(("version", "order"), zip(["0.19.3", "0.19.2rc0", "0.19.20"], ORDERS, strict=True))
    def test_untested_version_is_silently_unpatched(self, sandbox, version, order):
        write(sandbox.site, core_files(version))
        done = sandbox.run("-W", "always", "-c", f"{order}\n{UNPATCHED}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")

    @pytest.mark.parametrize("source", ["", "VERSION = compute()\n", None])
    def test_unknown_version_stays_unpatched(self, sandbox, source):
        file = sandbox.site / "megatron/core/package_info.py"
        file.unlink() if source is None else file.write_text(source)
        assert sandbox.output(UNPATCHED) == "False False"

    def test_version_in_a_file_that_is_not_ascii(self, sandbox):
        with (sandbox.site / "megatron/core/package_info.py").open("a", encoding="utf-8") as file:
            file.write("# é")
        environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        assert sandbox.output(UNPATCHED, **environment) == "True True"

    def test_version_importing_torch_late_is_importable(self, sandbox):
        files = core_files("0.18.0") | {"megatron/core/__init__.py": "import megatron.core.layers\n"}
        write(sandbox.site, files | {"megatron/core/layers.py": LAYERS + "    import torch\n"})
        done = sandbox.run("-c", f"import megatron.core\n{UNPATCHED}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")

    @pytest.mark.parametrize("order", ORDERS)
    def test_untested_version_is_patched_on_request(self, sandbox, order):
        write(sandbox.site, core_files("0.20.0"))
        code = f"{order}, megatron.core.layers as l\nprint(l.Linear.graphed)"
        done = sandbox.run("-W", "always", "-c", code, MEGATRON_FSDP_CUDA_GRAPHS="untested")
        assert done.stdout == "True\n", done.stderr
        assert done.stderr.count("found 0.20.0") == 1
        assert f"found 0.20.0 at {sandbox.site}/megatron/core/__init__.py" in done.stderr
        assert "python -m tools.upstream_check FOLDER" in done.stderr


class TestUntestedTraining:
    """Test warnings and rejected flags with an untested megatron-core."""

    ARGUMENTS = """
        def validate_args(args, defaults={}):
            "Validate."
            args.validated = defaults
            return args
    """
    START = """
        from types import SimpleNamespace
        from megatron.training.arguments import validate_args
        args = SimpleNamespace({flags})
        print(validate_args(args, dict(a=1)) is args, args.validated, validate_args.__doc__)
    """
    GRAPHS = "use_megatron_fsdp=True, cuda_graph_impl='transformer_engine'"

    @pytest.fixture
    def sandbox(self, sandbox):
        arguments = {"megatron/training/__init__.py": "import torch", "megatron/training/arguments.py": self.ARGUMENTS}
        write(sandbox.site, core_files("0.20.0") | arguments)
        write(sandbox.patch, {"training/arguments.py": ""})
        return sandbox

    @pytest.mark.parametrize(
        "flags",
        [
            "",
            "use_megatron_fsdp=True, cuda_graph_impl='none'",
            "use_megatron_fsdp=True, cuda_graph_impl='full_iteration'",
            "use_megatron_fsdp=False, cuda_graph_impl='transformer_engine'",
            "use_megatron_fsdp=True, cuda_graph_impl='local'",
        ],
    )
    def test_training_starts_with_one_warning(self, sandbox, flags):
        done = sandbox.run("-W", "error", "-c", dedent(self.START.format(flags=flags)))
        assert (done.returncode, done.stdout) == (0, "True {'a': 1} Validate.\n"), done.stderr
        (warning,) = done.stderr.splitlines()
        assert "tested with megatron-core 0.19.0, 0.19.1, 0.19.2 only" in warning
        assert f"found 0.20.0 at {sandbox.site}/megatron/core/__init__.py. It is left unpatched" in warning
        assert "Install megatron-core==0.19.2" in warning
        assert "MEGATRON_FSDP_CUDA_GRAPHS=untested" in warning

    def test_graphs_of_sharded_models_are_refused(self, sandbox):
        error = sandbox.error(self.START.format(flags=self.GRAPHS))
        flags = "--use-megatron-fsdp with --cuda-graph-impl transformer_engine"
        assert error.startswith(f"ValueError: {flags} needs the patch, which is off: ")
        assert "found 0.20.0" in error
        assert "MEGATRON_FSDP_CUDA_GRAPHS=0 to try megatron-core's own graphs" in error

    def test_only_the_first_rank_warns(self, sandbox):
        code = "import megatron.training.arguments"
        assert [bool(sandbox.run("-c", code, RANK=rank).stderr) for rank in "012"] == [True, False, False]

    @pytest.mark.parametrize("value", ["0", "untested"])
    def test_switch_disables_the_refusal(self, sandbox, value):
        code = self.START.format(flags=self.GRAPHS)
        assert sandbox.output(code, MEGATRON_FSDP_CUDA_GRAPHS=value) == "True {'a': 1} Validate."


class TestCheckoutAheadOnThePath:
    def test_patched_checkout_is_not_patched_again(self, sandbox):
        files = {**core_files(), "megatron/core/transformer/_cuda_graphs/__init__.py": ""}
        checkout = write(sandbox.folder / "Megatron-LM", files)
        code = """
            import megatron.core.layers as l
            from megatron_fsdp_cuda_graphs import overlay
            print(hasattr(l.Linear, "graphed"), overlay.is_patched(l))
        """
        assert sandbox.output(code, ahead=(checkout,)) == "False True"

    def test_untested_checkout_stays_unpatched(self, sandbox):
        checkout = write(sandbox.folder / "Megatron-LM", core_files("0.20.0rc0"))
        assert sandbox.output(UNPATCHED, ahead=(checkout,)) == "False False"

    def test_tested_checkout_is_patched(self, sandbox):
        write(sandbox.site, core_files("0.20.0rc0"))
        files = core_files("0.19.2")
        checkout = write(
            sandbox.folder / "Megatron-LM", {**files, "megatron/core/layers.py": "class Linear: ahead = 1"}
        )
        code = "import megatron.core.layers as l; print(l.Linear.graphed, l.Linear.ahead)"
        assert sandbox.output(code, ahead=(checkout,)) == "True 1"

    def test_checkout_added_later_is_judged_by_its_version(self, sandbox):
        checkout = write(sandbox.folder / "Megatron-LM", core_files("0.20.0rc0"))
        code = f"""
            import sys, torch, importlib.util
            importlib.util.find_spec("megatron.core")
            sys.path.insert(0, {str(checkout)!r})
            {UNPATCHED}
        """
        assert sandbox.output(code) == "False False"


class TestSwitch:
    def test_0_leaves_megatron_core_unpatched(self, sandbox):
        code = "import megatron.core.layers as l; print(l.__file__)"
        expected = str(sandbox.site / "megatron/core/layers.py")
        assert sandbox.output(code, MEGATRON_FSDP_CUDA_GRAPHS="0") == expected

    def test_upstream_without_the_patch_is_the_module(self, sandbox):
        code = """
            import megatron.core.layers as layers
            from megatron_fsdp_cuda_graphs.overlay import upstream
            print(upstream("megatron.core.layers") is layers)
        """
        assert sandbox.output(code, MEGATRON_FSDP_CUDA_GRAPHS="0") == "True"

    IS_ACTIVE = "import torch; from megatron_fsdp_cuda_graphs.overlay import is_active; print(is_active())"

    @pytest.mark.parametrize(
        ("values", "active"),
        [
            (["", "1", "true", "Yes", "ON", " 1", "\tuntested\n"], True),
            (["0", "false", "No", "OFF", "0 ", " False"], False),
        ],
    )
    def test_switch_accepts_several_spellings(self, sandbox, values, active):
        done = [sandbox.run("-c", self.IS_ACTIVE, MEGATRON_FSDP_CUDA_GRAPHS=value) for value in values]
        assert [(run.stdout, run.stderr) for run in done] == [(f"{active}\n", "")] * len(values)

    def test_unknown_switch_value_warns(self, sandbox):
        code = f"{self.IS_ACTIVE}\nfrom megatron_fsdp_cuda_graphs.overlay import activate; activate()"
        done = sandbox.run("-W", "error", "-c", code, MEGATRON_FSDP_CUDA_GRAPHS="maybe")
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        (warning,) = done.stderr.splitlines()
        assert warning.startswith("MEGATRON_FSDP_CUDA_GRAPHS=maybe is ignored: set it to 1 ")


class TestActivate:
    def test_twice_registers_one_finder(self, sandbox):
        code = """
            import importlib, sys, torch
            from megatron_fsdp_cuda_graphs import overlay
            importlib.reload(overlay).activate()
            print([type(finder).__name__ for finder in sys.meta_path].count("OverlayFinder"))
        """
        assert sandbox.output(code) == "1"

    @pytest.mark.parametrize("stub", ["None", "types.ModuleType('megatron')"])
    def test_stubs_of_megatron_do_not_break_torch(self, sandbox, stub):
        code = f"import sys, types; sys.modules['megatron'] = {stub}; sys.modules['megatron.core.layers'] = None"
        assert sandbox.output(f"{code}; import torch; print('imported')") == "imported"

    def test_activation_after_an_import_warns(self, sandbox):
        write(sandbox.site, {"torch/__init__.py": ""})  # as if torch's autoload were turned off
        code = """
            import megatron.core.layers
            from megatron_fsdp_cuda_graphs import overlay
            overlay.activate()
            print(overlay.is_active())
        """
        done = sandbox.run("-W", "error", "-c", dedent(code))
        assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
        assert "stays off, because megatron.core.layers was imported before it." in done.stderr

    def test_activation_before_any_import(self, sandbox):
        write(sandbox.site, {"torch/__init__.py": ""})
        code = """
            from megatron_fsdp_cuda_graphs import overlay
            overlay.activate()
            import megatron.core.layers as layers
            print(layers.Linear.graphed)
        """
        assert sandbox.output(code) == "True"
