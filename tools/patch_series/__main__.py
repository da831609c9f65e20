"""``python -m tools.patch_series CHECKOUT OUTPUT``."""

import argparse
import sys
from pathlib import Path

from .contents import patches
from .write import write_series


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 2 if there is nothing to make patches for, or no place for them."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.patch_series",
        description="Write the patch as series of patches for `git am` in a Megatron-LM checkout, which then needs "
        "neither this project nor its start-up. Those of the first, faults of megatron-core, apply each alone too.",
    )
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout, which is read only")
    parser.add_argument("output", type=Path, help="a new folder for the patches")
    args = parser.parse_args(arguments)
    try:
        written = write_series(patches(args.checkout), args.output)
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    print(f"\nApply them with: git -C {args.checkout} am {args.output.resolve()}/*/*.patch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
