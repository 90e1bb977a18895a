"""A plug-in of vLLM's CPU build (0.31), through vLLM's own ways: experts and tied output layers take new weights exactly, and routes come
with turns.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. The routes need `ROUTES` among the
engine's arguments.
"""

from __future__ import annotations

ROUTES = {
    "worker_cls": f"{__name__}.routes.RoutesWorker",
    "scheduler_cls": f"{__name__}.routes.RoutesScheduler",
    "enforce_eager": True,  # a compiled graph lacks the place where routes are caught
}
"""In place of `enable_return_routed_experts`, which the CPU build refuses."""


def register() -> None:
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if current_platform.is_cpu():
        from . import experts, tied

        experts.register()
        tied.register()
