"""`lego_sync` and `lego_async`: our steps on verl's two ways to share a machine between generation and training."""

from __future__ import annotations

import logging
from typing import Any

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from .steps import LegoSteps


@register_trainer("lego_sync")
class LegoSync(LegoSteps, PPOTrainerSync):
    """Generation and training take turns in one worker."""

    def on_init_end(self) -> None:
        probe = self._probe()
        super().on_init_end()
        self._admit(self.llm_server_manager.get_replicas(), probe)

    def on_step_end(self) -> None:
        probe = self._probe()
        super().on_step_end()
        self._admit(self.llm_server_manager.get_replicas(), probe)


@register_trainer("lego_async")
class LegoAsync(LegoSteps, PPOTrainerSeparateAsync):
    """Generation goes on in workers of its own; after each step verl interrupts it, sends the weights and lets it go on."""

    def _setup(self) -> None:
        # verl 0.9.1 passes print's `flush` to a logger here, which fails as soon as the line would be written.
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()

    def on_init_end(self) -> None:
        probe = self._probe()
        super().on_init_end()
        self._admit(self.standalone_server_manager.get_replicas(), probe)
        self._keep_weights()

    def on_step_end(self) -> None:
        probe = self._probe()
        super().on_step_end()
        self._admit(self.standalone_server_manager.get_replicas(), probe)
        self._keep_weights()
        self._feed(self.total_training_steps - self.global_steps)  # before an evaluation, which would leave places empty at its end

    def _keep_weights(self) -> None:
        if self._spec.monitors.lagged_fidelity:
            self.actor_rollout_wg.keep_weights(version=self.global_steps, oldest=self.global_steps - self._spec.trainer.staleness)

    def get_llm_client(self) -> Any:
        """verl's plain client: our proxy goes on behind an interrupted turn by itself, and knows which version sampled what."""
        return self.standalone_server_manager.get_client()
