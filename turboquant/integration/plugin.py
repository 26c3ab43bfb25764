"""Entry point `vllm.general_plugins`, which vLLM loads in every process.

It gives every worker the tq_* methods, callable by name over collective_rpc, and starts the native route in workers
where it is asked for (`turboquant.integration.activation`).  Otherwise nothing changes.
"""

import sys
from typing import Any

from turboquant.config import choice_error
from turboquant.integration import activation, calibrate, compat, sensitivity, telemetry
from turboquant.integration import vllm as hooks


def tq_install(self: Any, **options: Any) -> dict[str, Any]:
    """Install the hooks in this worker; options of `install_turboquant_hooks`.  Returns the statistics."""
    return hooks.install_turboquant_hooks(self.model_runner, **options).stats()


def tq_set_mode(self: Any, mode: str) -> str:
    hooks.set_mode(mode, self.model_runner)
    return hooks.get_mode(self.model_runner).value


def tq_free(self: Any) -> int:
    return hooks.free_kv_cache(self.model_runner)


def tq_stats(self: Any) -> dict[str, Any]:
    """Of the native route where the engine has it, else of the hooks."""
    backend = sys.modules.get("turboquant.integration.backend")
    if backend is not None and backend.compressed_layers(self.model_runner.vllm_config):
        found: dict[str, Any] = backend.stats(self.model_runner.vllm_config)
        return found
    return hooks.get_stats(self.model_runner)


def tq_uninstall(self: Any) -> None:
    hooks.uninstall(self.model_runner)


def tq_calibration_measure(self: Any) -> calibrate.Figures:
    return calibrate.measure(self.model_runner)


def tq_calibration_damages(self: Any) -> sensitivity.Damages:
    return calibrate.damages(self.model_runner)


def tq_calibration_start(self: Any) -> None:
    calibrate.start(self.model_runner)


def tq_calibration_finish(self: Any) -> calibrate.Figures:
    return calibrate.finish(self.model_runner)


def tq_call(self: Any, method: str, *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """One of the methods above, with refusals as data: ("ok", result) or (name of the error class, message).

    An exception in a worker reaches the caller of collective_rpc as a bare Exception behind pages of log.
    """
    allowed = [function.__name__ for function in WORKER_METHODS if function is not tq_call]
    try:
        if method not in allowed:
            raise choice_error("method", method, allowed)
        return "ok", getattr(self, method)(*args, **kwargs)
    except hooks.HookError as error:
        return type(error).__name__, str(error)
    except (ValueError, TypeError) as error:  # subclasses too: the caller knows this name only
        return ValueError.__name__, str(error)


WORKER_METHODS = (
    tq_install, tq_set_mode, tq_free, tq_stats, tq_uninstall, tq_calibration_measure, tq_calibration_damages,
    tq_calibration_start, tq_calibration_finish, tq_call
)  # fmt: skip


def activate(vllm_config: Any) -> bool:
    """Start the native route for the model that a worker is about to build; whether it is asked for."""
    config = activation.requested(vllm_config.additional_config)
    if config is None:
        return False
    from turboquant.integration import backend

    if objections := compat.config_objections(vllm_config):
        listed = "\n- ".join(objections)
        raise hooks.UnsupportedEngineError(f"turboquant cannot serve this engine:\n- {listed}")
    backend.install(config)
    return True


def loaded(runner: Any) -> None:
    """Calibrate a model that a worker has loaded for the native route, and choose its bits."""
    from turboquant.integration import backend

    if backend.compressed_layers(runner.vllm_config):
        backend.calibrate_loaded(runner)
        backend.allocate_loaded(runner)


def register() -> None:
    """Called by vLLM in every process; idempotent.  Refuses variables that cannot be meant."""
    activation.requested()
    telemetry.offer()
    compat.patch_workers(activate, loaded)
    add_worker_methods()


def add_worker_methods() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    for method in WORKER_METHODS:
        existing = getattr(WorkerBase, method.__name__, None)
        if existing is None:
            setattr(WorkerBase, method.__name__, method)
        elif existing is not method:
            raise RuntimeError(f"vLLM's WorkerBase already has a method {method.__name__}")
