"""Every command in the documents is run by a test or by CI, or can only be run by hand and is listed so.

This keeps documents and runs together: a new command needs an entry here, and an entry goes when its command does.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMAND = re.compile(
    r"([A-Z_]+=\S+ )*(make|pip|python|git( -C \S+)?|torchrun|sbatch|unzip|bash|pre-commit|examples/launch\S+) [^=]\S*.*"
    r"|benchmarks/\S+\.sh|\.ci/run"
)
FENCED = re.compile(r"^ *```[a-z]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
BY_HAND = "needs GPUs, a user's machine, or more time than CI has"
LAST = "part -j2 --output-sync WORKERS=0 test-patch-quick test-newest-torch test-versions demo\n"  # of .ci/run

# How commands begin; the file that runs them, and what it calls.
RUN_BY = {
    r"pip install -c constraints.txt": ("Makefile", "pip install --quiet --no-compile --constraint constraints.txt"),
    r"pip uninstall": ("tests/integration_tests/test_install.py", '"uninstall"'),
    r"pip install --no-deps": ("tests/integration_tests/test_install.py", '["--no-deps"]'),
    r"pip download|unzip|pip install --no-build-isolation": BY_HAND,
    r"python -m megatron_fsdp_cuda_graphs( {2}.*)?": ("tests/unit_tests/test_doctor.py", '"megatron_fsdp_cuda_graphs"'),
    r"python -m megatron_fsdp_cuda_graphs (plan|explain)": (
        "tests/unit_tests/plan/test_plan.py",
        "def test_exit",
    ),
    r"python -m tools.upstream_check": ("Makefile", "tools.upstream_check build/cores"),
    r"python -m tools.patch_series": ("tests/unit_tests/test_patch_series.py", "README"),
    r"git( -C \S+)? am": ("tests/unit_tests/test_patch_series.py", "README"),
    r"(PY=python )?make test( .*)?": (".ci/run", "part test\n"),
    r"make \.venv": (".ci/run", "part .venv\n"),
    r"make lint": (".ci/run", "part lint\n"),
    r"make demo": (".ci/run", LAST),
    r"make test-versions": (".ci/run", LAST),
    r"make test-torches": ("Makefile", "test-torches"),
    r"make test-installed": ("Makefile", "test-installed"),
    r"make test-newest-torch": (".ci/run", LAST),
    r"make test-patch": ("Makefile", "test-installed test-patch demo\n"),
    r"make test-patch-quick": (".ci/run", LAST),
    r"make (test-all|test-processors|test-avx2|test-sse4|test-threads)": BY_HAND,
    r"make test-functional": ("tests/integration_tests/test_functional_cases.py", "run.main("),
    r"make PYTHON=NAME": BY_HAND,
    r"make docs": ("tests/unit_tests/test_compatibility.py", "compatibility.md"),
    r"make format": (".ci/run", "part lint\n"),  # which wants what it leaves
    r"make (test-gpu|bench|measure)": BY_HAND,
    r"pre-commit": BY_HAND,
    r"\.ci/run": BY_HAND,
    r"python benchmarks/repeated_training.py": (
        "tests/integration_tests/benchmarks/test_repeated_training.py",
        "repeated_training.py",
    ),
    r"python benchmarks/step_time.py": ("tests/integration_tests/benchmarks/test_step_time.py", "step_time.py"),
    r"python -m tests.support.loop_launches": BY_HAND,
    r"python -m tests.support.pairs": ("tests/integration_tests/test_pairs.py", "pairs.sample()"),
    r"python -m tests.support.mutate": ("tests/unit_tests/support/test_mutate.py", "tests.support"),
    r"torchrun .*inject_faults.py": ("tests/integration_tests/test_faults_in_capture.py", "inject_faults"),
    r"python examples/prepare_text.py": ("tests/unit_tests/examples/test_prepare_text.py", "prepare_text"),
    r"NNODES=.* examples/launch_nodes.sh": ("tests/unit_tests/examples/test_launch_scripts.py", '"launch_nodes.sh"'),
    r"sbatch": ("tests/unit_tests/examples/test_launch_scripts.py", "launch.sbatch"),
    r"GPUS=.* examples/launch_gpt.sh": ("tests/unit_tests/examples/test_launch_scripts.py", '"launch_gpt.sh"'),
    r"torchrun .*cpu_backend examples/pretrain_gpt.py": ("examples/demo.py", "cpu_backend"),
}


def commands(page):
    """The commands in the code of a page, of indented and fenced blocks and inside of lines."""
    text = page.read_text()
    lines = "\n".join(FENCED.findall(text)).splitlines()
    text = FENCED.sub("", text)
    lines += re.findall(r"^ {4}\S.*$", text, re.MULTILINE)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    return {line.strip() for line in lines if COMMAND.fullmatch(line.strip())} - {"git am"}


DOCUMENTED = {(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page)}


def ran_by(command):
    return [start for start in RUN_BY if re.match(rf"{start}(?!\S)", command)]


def test_commands_are_found():
    assert {"README.md", "CONTRIBUTING.md", "docs/plan.md", "examples/README.md"} <= {page for page, _ in DOCUMENTED}
    assert ("README.md", "make demo") in {(page, command.partition("  ")[0]) for page, command in DOCUMENTED}


def test_every_command_is_run_somewhere():
    not_run = [f"{page}: {command}" for page, command in sorted(DOCUMENTED) if not ran_by(command)]
    assert not not_run, "\n".join(["add what runs these commands to RUN_BY:", *not_run])


def test_every_command_that_is_run_is_documented():
    gone = [start for start in RUN_BY if not any(start in ran_by(command) for _, command in DOCUMENTED)]
    assert not gone, "\n".join(["no document has these commands of RUN_BY:", *gone])


def test_what_runs_a_command_is_there():
    called = [(start, *by) for start, by in RUN_BY.items() if by is not BY_HAND]
    absent = [f"{start}: {call} in {path}" for start, path, call in called if call not in (ROOT / path).read_text()]
    assert called and not absent, "\n".join(["what runs these commands is not there:", *absent])


def test_the_flags_for_a_machine_without_a_gpu_are_those_that_tests_train_with():
    from tests.support.pretrain import FLAGS

    _, _, after = (ROOT / "examples/README.md").read_text().partition("cpu_backend examples/pretrain_gpt.py")
    given = set(re.findall(r"--[a-z-]+", after.partition("...")[0]))
    assert given <= set(FLAGS.split())
    assert {flag for flag in FLAGS.split() if re.fullmatch("--no-.*|--distributed-backend", flag)} <= given
