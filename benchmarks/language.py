"""Whether a calibration on English prose alone serves code and Chinese text, too.

    python benchmarks/language.py MODEL --json benchmarks/results/language.json

Both texts are forced token by token (`turboquant.integration.quality`) upon the native cache and upon compressed ones:
calibrated on the package's text of several kinds (the default), on English prose alone, and not at all.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from turboquant.integration import quality, quality_report  # noqa: E402
from turboquant.integration.engine_benchmark import versions  # noqa: E402

CHINESE = HERE / "texts" / "chinese.txt"
PIECE = 512  # tokens of a prompt of the calibration
PIECES = 16


def calibrate(model: str, path: Path, arguments: argparse.Namespace) -> None:
    """Write a calibration of English prose alone, in a process of its own."""
    from vllm import LLM

    import turboquant

    options = {"dtype": arguments.dtype, "enforce_eager": True, "max_model_len": arguments.context + 1}
    llm = LLM(model, **options | json.loads(arguments.engine))
    ids = llm.get_tokenizer().encode(quality.prose())
    turboquant.calibrate(llm, path, [ids[i * PIECE : (i + 1) * PIECE] for i in range(PIECES)])


def plan(arguments: argparse.Namespace, source: str, calibration: Path) -> quality_report.Plan:
    preset = arguments.preset
    contenders = [preset, f"{preset}+calibration={calibration}", f"{preset}+calibration=none"]
    return quality_report.Plan(
        contenders, [arguments.context], 1, arguments.forced, 0, 0, [source], arguments.dtype,
        json.loads(arguments.options), json.loads(arguments.engine), arguments.jobs,
    )  # fmt: skip


def rows(arguments: argparse.Namespace, model: str, calibration: Path) -> list[dict[str, Any]]:
    names = {arguments.preset: "several kinds", f"{arguments.preset}+calibration=none": "none"}
    found = []
    for text, source in (("code", quality.code()), ("chinese", CHINESE.read_text(encoding="utf-8"))):
        with tempfile.TemporaryDirectory() as folder:
            chosen = plan(arguments, source, calibration)
            for kind, row in quality_report.measure(chosen, Path(folder), model, lambda: None):
                if kind == "failed":
                    raise SystemExit(f"{row}")
                found.append({"text": text, "calibrated_on": names.get(row.pop("contender"), "English prose")} | row)
                print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--preset", default="k4v4")
    parser.add_argument("--context", type=int, default=1152)
    parser.add_argument("--forced", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--options", default="{}", help="of turboquant, JSON")
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, JSON")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--calibrate", type=Path, help=argparse.SUPPRESS)  # what the process below does
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.calibrate:
        calibrate(arguments.model, arguments.calibrate, arguments)
        return
    report = {"command": shlex.join(["python", "benchmarks/language.py", *sys.argv[1:]]), **versions()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "english.safetensors"
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--calibrate", str(file)], check=True)
        report["rows"] = rows(arguments, arguments.model, file)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
