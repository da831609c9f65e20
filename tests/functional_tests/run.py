"""Train the recipes of ``test_cases`` and compare them with golden values and eager training.

    python tests/functional_tests/run.py                              # all cases that this machine supports
    python tests/functional_tests/run.py gpt moe/fsdp_parts           # a folder and a case
    python tests/functional_tests/run.py gpt --against-eager          # also train their eager cases
    python tests/functional_tests/run.py gpt --record --golden FOLDER # write golden values

A case is a folder with a ``model_config.yaml``:
    BASE          case that provides all missing keys except EQUALS and TEST_TYPE
    EQUALS        eager case whose losses and gradient norms must be bit-identical
    TEST_TYPE     regular; or ckpt-resume: stop halfway and resume from the checkpoint
    RANKS         number of processes, each with its own GPU unless CPU_BACKEND is set
    CPU_BACKEND   true for the CPU backend
    NEEDS         required packages
    PYTHON_PATH   additional folders of this repository for PYTHONPATH
    ENV_VARS      environment variables; null removes a variable of BASE
    MODEL_ARGS    flags of megatron.training; null removes a flag of BASE
    BOUNDS        maximum ratios of ms, max_allocated_mib or max_reserved_mib to the golden value

If the versions of torch, megatron-core and TransformerEngine match, the losses, gradient norms and evaluation losses
must be bit-identical to the golden values of this GPU model. On the CPU backend, rounding depends on the processor, so
golden values have a tolerance (``tests/support/trainings/rounding.py``). Cases must always be bit-identical to their
eager cases.
``--record`` also trains the eager cases, and writes nothing for a case that differs from its eager case. Cases with the
same rank layout share processes. The exit code is 1 if a case fails or no case runs.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.results_file import command_line, write_results  # noqa: E402
from tests.functional_tests._runner import golden  # noqa: E402
from tests.functional_tests._runner.case import MEASURED, Case, find, load  # noqa: E402
from tests.functional_tests._runner.machine import this_machine  # noqa: E402
from tests.functional_tests._runner.trainings import Found, train  # noqa: E402
from tests.functional_tests._runner.verdict import Verdict, compare_with_golden, judge, record  # noqa: E402


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments.

    Raises:
        SystemExit: The arguments are invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="a case or a folder of cases (default: all)")
    parser.add_argument(
        "--against-eager",
        action="store_true",
        help="compare with eager cases, as always on the CPU backend",
    )
    parser.add_argument("--record", action="store_true", help="write golden values; implies --against-eager")
    parser.add_argument(
        "--golden", type=Path, metavar="FOLDER", help="folder of golden values (default: beside the cases)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="file of the results, as JSON")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="new folder for logs and checkpoints")
    parser.add_argument("--stall-seconds", type=float, default=240, help="maximum duration of a training")
    args = parser.parse_args(arguments)
    if args.logs and args.logs.exists():
        parser.error(f"--logs {args.logs} exists: name a new folder")
    return args


def run(args: argparse.Namespace, logs: Path) -> tuple[list[Verdict], dict[str, str]]:
    """Train and compare the selected cases.

    Returns:
        The verdicts, and the reasons for skipping cases, keyed by name.

    Raises:
        ValueError: A case is invalid or missing.
    """
    machine = this_machine()
    asked = find(args.cases)
    reasons = {case.name: machine.cannot_run(case) for case in asked}
    cases = [case for case in asked if not reasons[case.name]]
    against_eager = args.against_eager or args.record or not machine.gpus
    verdicts: list[Verdict] = []

    def ended(case: Case, found: dict[str, Found]) -> None:
        if case in cases:
            verdict = judge(case, found[case.name], found[case.equals] if case.equals and against_eager else None)
            file = golden.path(case, machine.name, args.golden)
            (record if args.record else compare_with_golden)(verdict, file)
            verdicts.append(verdict)

    train(
        _with_eager(cases) if against_eager else cases,
        names=MEASURED,
        logs=logs,
        stall_seconds=args.stall_seconds,
        ended=ended,
    )
    return verdicts, {name: reason for name, reason in reasons.items() if reason}


def _with_eager(cases: list[Case]) -> list[Case]:
    """Return ``cases``, each preceded by the eager case that it must equal."""
    all_of_them: dict[str, Case] = {}
    for case in cases:
        if case.equals:
            all_of_them.setdefault(case.equals, load(case.equals))
        all_of_them.setdefault(case.name, case)
    return list(all_of_them.values())


def report(verdicts: list[Verdict], not_run: dict[str, str]) -> str:
    """Return the differences, the skipped cases, and the table."""
    lines = []
    for verdict in verdicts:
        reasons = [*verdict.differences, *verdict.notes]
        if reasons:
            lines += [f"{verdict.case.name}:", *(f"    {reason}" for reason in reasons)]
    lines += [f"{name}: not run: {reason}" for name, reason in not_run.items()]
    wide = max([len(verdict.case.name) for verdict in verdicts], default=4)
    lines.append(f"\n{'case':{wide}}  passed  {'ms':>8}  {'MiB':>6}")
    for verdict in verdicts:
        measured = verdict.found.measured
        # The CPU backend does not measure memory.
        numbers = f"{measured['ms']:8.1f}  {measured['max_reserved_mib'] or '-':>6}" if measured else ""
        lines.append(f"{verdict.case.name:{wide}}  {'yes' if verdict.passed else 'NO':6}  {numbers}".rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the report, and return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parse(given)
    with tempfile.TemporaryDirectory() as folder:
        logs = (args.logs or Path(folder) / "logs").resolve()
        logs.mkdir(parents=True)
        try:
            verdicts, not_run = run(args, logs)
        except ValueError as wrong:
            print(f"error: {wrong}", file=sys.stderr)
            return 2
    print(report(verdicts, not_run))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_results(
            args.output,
            command=command_line("tests/functional_tests/run.py", given),
            gpus=max((verdict.case.ranks for verdict in verdicts), default=0),
            results=[verdict.row() for verdict in verdicts],
            not_run=not_run,
        )
    return int(not verdicts or not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
