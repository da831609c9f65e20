"""capture_time: the benchmark runs; what it measures on a CPU means nothing."""

from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "capture_time.py"
