"""Load cases from ``model_config.yaml`` files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CASES = Path(__file__).resolve().parents[1] / "test_cases"
FILE = "model_config.yaml"
REGULAR, RESUME = "regular", "ckpt-resume"
INHERITED = ("RANKS", "CPU_BACKEND", "NEEDS", "PYTHON_PATH")
MERGED = ("ENV_VARS", "MODEL_ARGS", "BOUNDS")
KEYS = {"BASE", "EQUALS", "TEST_TYPE", *INHERITED, *MERGED}
# Measurements that can be bounded
MEASURED = ("ms", "max_allocated_mib", "max_reserved_mib")


@dataclass(frozen=True)
class Case:
    """A training run and its expected results.

    Attributes:
        name: Folder relative to ``CASES``, for example ``gpt/fsdp_whole_layers``.
        folder: The folder that contains the golden values.
        resumes: Stop training halfway and resume from a checkpoint.
        ranks: Number of processes.
        on_cpu: Use the CPU backend.
        needs: Required packages.
        python_path: Additional folders of the repository for PYTHONPATH.
        environment: Environment variables of the processes.
        arguments: Flags of ``megatron.training`` and their values; True for a flag without a value.
        equals: Name of the eager case that this case must equal; None for an eager case.
        bounds: Maximum ratio of each measurement (see ``MEASURED``) to its golden value.
    """

    name: str
    folder: Path
    resumes: bool
    ranks: int
    on_cpu: bool
    needs: tuple[str, ...]
    python_path: tuple[str, ...]
    environment: dict[str, str]
    arguments: dict[str, Any]
    equals: str | None
    bounds: dict[str, float]

    @property
    def flags(self) -> list[str]:
        """The arguments as a command line."""
        words: list[str] = []
        for flag, value in self.arguments.items():
            given = value if isinstance(value, list) else [value]
            words += [flag, *(str(each) for each in given if each is not True)]
        return words

    @property
    def steps(self) -> int:
        """Total number of training steps."""
        return int(self.arguments["--train-iters"])

    @property
    def graphs(self) -> str:
        """Value of ``--cuda-graph-impl``."""
        return str(self.arguments.get("--cuda-graph-impl", "none"))


def load(name: str, root: Path = CASES) -> Case:
    """Return the case ``name`` under ``root``, merged with its BASE.

    Raises:
        ValueError: The file is missing or has an invalid key.
    """
    merged = _merged(name, root, ())
    where = f"{name}/{FILE}"
    missing = [key for key in ("RANKS", "MODEL_ARGS") if key not in merged]
    if missing or "--train-iters" not in merged["MODEL_ARGS"]:
        raise ValueError(f"{where}: set {', '.join(missing) or '--train-iters in MODEL_ARGS'}, here or in its BASE")
    kind = merged.get("TEST_TYPE", REGULAR)
    if kind not in (REGULAR, RESUME):
        raise ValueError(f"{where}: TEST_TYPE is {kind!r}; it can be {REGULAR} or {RESUME}")
    for measured in merged["BOUNDS"]:
        if measured not in MEASURED:
            raise ValueError(f"{where}: BOUNDS has {measured!r}; it can have {', '.join(MEASURED)}")
    return Case(
        name=name,
        folder=root / name,
        resumes=kind == RESUME,
        ranks=int(merged["RANKS"]),
        on_cpu=bool(merged.get("CPU_BACKEND", False)),
        needs=tuple(merged.get("NEEDS", ())),
        python_path=tuple(merged.get("PYTHON_PATH", ())),
        environment={variable: str(value) for variable, value in merged["ENV_VARS"].items()},
        arguments=merged["MODEL_ARGS"],
        equals=merged.get("EQUALS"),
        bounds={measured: float(factor) for measured, factor in merged["BOUNDS"].items()},
    )


def _merged(name: str, root: Path, extending: tuple[str, ...]) -> dict[str, Any]:
    """Return the keys of a case merged over the keys of its BASE; null removes a flag, variable or bound."""
    path = root / name / FILE
    if name in extending:
        raise ValueError(f"{name}/{FILE}: BASE leads back to it: {' -> '.join((*extending, name))}")
    if not path.is_file():
        named = f", which is the BASE of {extending[-1]}" if extending else ""
        raise ValueError(f"there is no case {name!r}{named}: no file {FILE} in {path.parent}")
    own = yaml.safe_load(path.read_text())
    if not isinstance(own, dict) or set(own) - KEYS:
        wrong = ", ".join(sorted(set(own) - KEYS)) if isinstance(own, dict) else "no keys"
        raise ValueError(f"{name}/{FILE}: has {wrong}; it can have {', '.join(sorted(KEYS))}")
    base = _merged(own["BASE"], root, (*extending, name)) if "BASE" in own else {}
    merged = {key: base[key] for key in INHERITED if key in base} | own
    for key in MERGED:
        both = base.get(key, {}) | (own.get(key) or {})
        merged[key] = {entry: value for entry, value in both.items() if value is not None}
    return merged


def find(given: Iterable[str], root: Path = CASES) -> list[Case]:
    """Return the cases in ``given``, names of cases or folders of cases; all cases if it is empty.

    Raises:
        ValueError: A case does not exist.
    """
    names: list[str] = []
    for text in given or [str(root)]:
        folder = root / text if (root / text).is_dir() else Path(text)
        found = sorted(file.parent.resolve() for file in folder.glob(f"**/{FILE}"))
        if not found or not all(each.is_relative_to(root.resolve()) for each in found):
            raise ValueError(f"there is no case {text!r}: give one of {', '.join(_names(root))}, or a folder of them")
        names += [each.relative_to(root.resolve()).as_posix() for each in found]
    return [load(name, root) for name in dict.fromkeys(names)]


def _names(root: Path) -> list[str]:
    return sorted(file.parent.relative_to(root).as_posix() for file in root.glob(f"**/{FILE}"))
