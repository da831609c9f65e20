"""``model_config.yaml`` files and their errors."""

import pytest

from tests.functional_tests._runner.case import FILE, find, load

EAGER = """
TEST_TYPE: regular
RANKS: 2
CPU_BACKEND: true
NEEDS: [torch]
ENV_VARS: {A: 1, B: two}
MODEL_ARGS: {--train-iters: 8, --bf16: true, --lr: 1e-3, --fused: true}
BOUNDS: {ms: 2.0}
"""
GRAPHED = """
BASE: gpt/eager
EQUALS: gpt/eager
TEST_TYPE: ckpt-resume
ENV_VARS: {B: null}
MODEL_ARGS: {--fused: null, --cuda-graph-modules: [attn, moe_router], --train-iters: 6}
"""


@pytest.fixture
def write(tmp_path):
    """Return a function that writes files of cases and returns their root."""

    def write_files(**files: str):
        for name, text in files.items():
            folder = tmp_path / "gpt" / name
            folder.mkdir(parents=True)
            (folder / FILE).write_text(text)
        return tmp_path

    return write_files


def test_arguments_become_a_command_line(write):
    case = load("gpt/eager", write(eager=EAGER))
    assert case.flags == ["--train-iters", "8", "--bf16", "--lr", "1e-3", "--fused"]
    assert (case.steps, case.ranks, case.on_cpu, case.needs) == (8, 2, True, ("torch",))
    assert case.environment == {"A": "1", "B": "two"}
    assert case.bounds == {"ms": 2.0}
    assert (case.graphs, case.equals, case.resumes) == ("none", None, False)


def test_base_provides_missing_keys(write):
    case = load("gpt/graphed", write(eager=EAGER, graphed=GRAPHED))
    assert case.flags == ["--train-iters", "6", "--bf16", "--lr", "1e-3", "--cuda-graph-modules", "attn", "moe_router"]
    assert case.environment == {"A": "1"}
    assert (case.ranks, case.on_cpu, case.needs, case.bounds) == (2, True, ("torch",), {"ms": 2.0})
    assert case.equals == "gpt/eager"
    assert case.resumes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RANKS: 2\nMODEL_ARGS: {--bf16: true}", "set --train-iters in MODEL_ARGS"),
        ("MODEL_ARGS: {--train-iters: 8}", "set RANKS"),
        ("RANKS: 2\nMODEL_ARGS: {--train-iters: 8}\nTEST_TYPE: release", "TEST_TYPE is 'release'"),
        ("RANKS: 2\nMODEL_ARGS: {--train-iters: 8}\nBOUNDS: {mib: 2}", "BOUNDS has 'mib'"),
        ("RANK: 2\nMODEL_ARGS: {--train-iters: 8}", "has RANK; it can have"),
        ("- a list", "has no keys"),
        ("BASE: gpt/wrong", "BASE leads back to it: gpt/wrong -> gpt/wrong"),
        ("BASE: gpt/none", "no case 'gpt/none', which is the BASE of gpt/wrong"),
    ],
)
def test_invalid_file_is_named(write, text, words):
    with pytest.raises(ValueError) as error:
        load("gpt/wrong", write(wrong=text))
    assert words in str(error.value)


def test_cases_are_found_by_name_and_folder(write, monkeypatch):
    root = write(eager=EAGER, graphed=GRAPHED)
    both = ["gpt/eager", "gpt/graphed"]
    assert [case.name for case in find([], root)] == both
    assert [case.name for case in find(["gpt"], root)] == both
    assert [case.name for case in find(["gpt/graphed", "gpt"], root)] == both[::-1]
    monkeypatch.chdir(root / "gpt")
    assert [case.name for case in find(["eager/"], root)] == ["gpt/eager"]
