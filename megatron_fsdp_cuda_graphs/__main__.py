"""Inspect an environment or a training command for CUDA graphs under Megatron-FSDP.

Usage: python -m megatron_fsdp_cuda_graphs [COMMAND]

Commands:
    doctor    report whether graphs can work here: patched modules, versions, missing packages (the default)
    plan      check the flags of pretrain_gpt without a GPU; show their graphs and memory
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the given command, by default from the command line, and return its exit code."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["doctor"]
    if command == "doctor":
        from .doctor import main as doctor

        return doctor(rest)
    if command == "plan":
        from .plan.command import plan

        return plan(rest)
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    print(f"no command {command!r}\n\n{__doc__}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
