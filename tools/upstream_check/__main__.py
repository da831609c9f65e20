"""``python -m tools.upstream_check FOLDER``."""

import argparse
import sys
from pathlib import Path

from megatron_fsdp_cuda_graphs.overlay import find_core

from .check import check
from .sources import Sources


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if something would break, 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.upstream_check",
        description="Check the patch against another megatron-core, which is read and not imported: names that the "
        "patch relies on, parameters of what it takes the place of, and who imports what it replaces.",
    )
    parser.add_argument("folder", type=Path, help="it holds megatron/core: a Megatron-LM checkout or a site-packages")
    parser.add_argument("--against", type=Path, help="the one to compare with (default: the installed megatron-core)")
    args = parser.parse_args(arguments)
    try:
        findings = check(Sources(args.against or _installed()), Sources(args.folder))
    except FileNotFoundError as error:
        print(error)
        return 2
    print(findings)
    return int(bool(findings.broken))


def _installed() -> Path:
    """Return the folder that holds the installed ``megatron/core``.

    Raises:
        FileNotFoundError: there is none.
    """
    core = find_core()
    if core is None:
        raise FileNotFoundError("megatron-core is not installed: name another to compare with by --against")
    return Path(core.origin).parents[2]


if __name__ == "__main__":
    sys.exit(main())
