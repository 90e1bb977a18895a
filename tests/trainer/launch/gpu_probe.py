"""How far training on GPUs gets on a machine that has none, in processes of their own because verl chooses its platform once.

usage: python -m tests.trainer.launch.gpu_probe classes PRESET…   what verl finds for the classes of each preset, as JSON
       python -m tests.trainer.launch.gpu_probe launch RUN_DIR    the launcher, told that nothing is missing, on a GPU that only Ray sees
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

RENAMED = {"log_prob_use_dynamic_bsz": "use_dynamic_bsz"}


def classes(presets: list[str]) -> None:
    from trainer.launch import environment

    environment.apply("cuda", own_cluster=True)
    import verl.trainer.main_ppo
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.device import get_device_name, get_vendor
    from verl.utils.import_utils import load_class_from_fqn, load_extern_type
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from server.spec import resolve
    from trainer.launch.plan import trainer_plan

    found: dict[str, Any] = {"device": [get_device_name(), get_vendor()]}
    for preset in presets:
        with initialize_config_dir(str(Path(verl.trainer.main_ppo.__file__).parent / "config"), version_base=None):
            config = compose("ppo_trainer", trainer_plan(resolve({"extends": preset}).spec).command[3:])
        hybrid = config.actor_rollout_ref
        reference = OmegaConf.to_container(hybrid.ref, resolve=True)  # verl's worker gives its keys these names
        for name_there in [key for key in reference if key.startswith("log_prob_")]:
            reference[RENAMED.get(name_there, name_there.replace("log_prob", "ppo"))] = reference.pop(name_there)
        parts = (hybrid.actor, OmegaConf.create(reference), hybrid.rollout, hybrid.rollout.checkpoint_engine)
        kinds = [type(omega_conf_to_dataclass(part)).__name__ for part in parts]
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)
        bare = trainer.__new__(trainer)  # what chooses the workers looks at the configuration only
        bare.config, bare._enable_hybrid_replicas = config, hybrid.hybrid_engine
        bare._init_resource_pool_mgr()
        workers = {str(role): name(worker.__ray_metadata__.modified_class) for role, worker in bare.role_worker_mapping.items()}
        engines = EngineRegistry._engines["language_model"].get(hybrid.actor.strategy)
        found[preset] = {
            "configs": kinds,
            "trainer": name(trainer),
            "workers": workers,
            "manager": name(load_class_from_fqn(hybrid.rollout.agent.agent_loop_manager_class, "AgentLoopManager")),
            "dataset": name(load_extern_type(config.data.custom_cls.path, config.data.custom_cls.name)),
            "replica": RolloutReplicaRegistry._registry[hybrid.rollout.name].__module__,
            "engine": name(EngineRegistry.get_engine_cls("language_model", hybrid.actor.strategy)) if engines else None,
        }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def name(kind: type) -> str:
    """As Ray's own base class for actors would otherwise show through."""
    return next(f"{base.__module__}.{base.__name__}" for base in kind.__mro__ if not base.__module__.startswith("ray."))


def launch(root: Path) -> int:
    from trainer.launch import driver, preflight

    def with_a_gpu(*arguments: Any) -> list[str]:
        return [*overrides(*arguments), "+ray_kwargs.ray_init.num_gpus=1"]

    overrides, driver.overrides = driver.overrides, with_a_gpu
    preflight.troubles = lambda _: iter(())
    return driver.launch(root)


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if sys.argv[1] == "classes":
        classes(sys.argv[2:])
    else:
        sys.exit(launch(Path(sys.argv[2])))
