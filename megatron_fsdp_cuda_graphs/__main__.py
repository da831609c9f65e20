"""``python -m megatron_fsdp_cuda_graphs [COMMAND]``: what to know before graphs under Megatron-FSDP are used.

Commands:
    doctor          whether they can work here: what is patched, which versions there are, what is missing (the default)
    plan            what flags of pretrain_gpt would capture and keep in memory, and whether they fit together; no GPU
    explain         why each part of the model of such flags runs in graphs or eagerly
"""

import importlib
import sys
from collections.abc import Sequence

# The module of each, and its function that takes the arguments.
COMMANDS = {
    "doctor": ("doctor", "main"),
    "plan": ("plan.command", "plan"),
    "explain": ("plan.command", "explain"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default the one on the command line; return the exit code."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["doctor"]
    if command not in COMMANDS:
        asked = command in ("-h", "--help")
        usage = __doc__.replace("``", "").strip()
        print(usage if asked else f"no command {command!r}\n\n{usage}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    module, function = COMMANDS[command]
    return getattr(importlib.import_module(f".{module}", __package__), function)(rest)


if __name__ == "__main__":
    sys.exit(main())
