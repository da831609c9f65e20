"""``python -m megatron_fsdp_cuda_graphs [COMMAND]``: what to know before graphs under Megatron-FSDP are used.

Commands:
    doctor          whether they can work here: what is patched, which versions there are, what is missing (the default)
    plan            what flags of pretrain_gpt would capture and keep in memory, and whether they fit together; no GPU
    explain         why each part of the model of such flags runs in graphs or eagerly
    upstream        what another megatron-core would break
    patch-series    the patch as patches for `git am` in a Megatron-LM checkout
"""

import importlib
import sys

# The module of each, whose ``main`` takes its arguments.
COMMANDS = {
    "doctor": "doctor",
    "plan": "launch_plan.plan",
    "explain": "launch_plan.explain",
    "upstream": "upstream_check.cli",
    "patch-series": "patch_series.cli",
}


def main(arguments: list[str]) -> int:
    """Run a command; return the exit code."""
    command, *rest = arguments or ["doctor"]
    if command not in COMMANDS:
        asked = command in ("-h", "--help")
        usage = __doc__.replace("``", "").strip()
        print(usage if asked else f"no command {command!r}\n\n{usage}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    status: int = importlib.import_module(f".{COMMANDS[command]}", __package__).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
