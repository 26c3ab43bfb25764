"""The README's pictures, from the result files: `python benchmarks/plots.py` writes them beside this file."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from tables import QUALITY, quality_rows, results  # noqa: E402

from benchmark import plot_engines  # noqa: E402
from turboquant.integration import quality_report  # noqa: E402


def all_quality() -> dict[str, Any]:
    return {"rows": [row for name in QUALITY for row in quality_rows(name)]}


PLOTS: dict[str, tuple[Callable[[dict[str, Any], Path], None], Callable[[], dict[str, Any]]]] = {
    "quality.png": (quality_report.plot, all_quality),
    "engine.png": (plot_engines, lambda: results("h200-engine")),
}


def write(folder: Path) -> None:
    for name, (plot, report) in PLOTS.items():
        plot(report(), folder / name)


if __name__ == "__main__":
    write(HERE)
