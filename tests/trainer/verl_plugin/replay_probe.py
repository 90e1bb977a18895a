"""verl's training worker on one CPU process: log-probs of one sequence under its own, the recorded and shifted routes, as JSON. First by
the engine for CPUs, then by the one that GPUs have.

usage: python -m tests.trainer.verl_plugin.replay_probe MODEL_DIR SAMPLE.json PORT
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main(model: str, sample: str, port: str) -> None:
    prepare(port)
    import torch

    case = json.loads(Path(sample).read_text())
    routes = torch.tensor(case["routes"], dtype=torch.int16)
    shifted = torch.cat([routes[:1], routes[:-1]])
    answer: dict[str, dict[str, Any]] = {}
    for device in ("cpu", "cuda"):
        os.environ |= {"VERL_ENGINE_DEVICE": device, "VERL_ENGINE_VENDOR": "nvidia"}
        worker, found = make_worker(model), dict[str, Any]()
        for name, used in (("own", None), ("replay", routes), ("shifted", shifted)):
            found[name] = log_probs(worker, case, used)
            found[f"{name}_counts"] = asdict(worker.engine.replay.take())
        answer[device] = found
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def prepare(port: str, rank: int = 0, world: int = 1) -> None:
    """Make this process a training worker's: environment, one thread, its place in the process group."""
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "trainer.verl_plugin.platform_cpu,trainer.verl_plugin.routing_replay",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "HF_HUB_OFFLINE": "1",
    }
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)


def make_worker(model: str, **engine: Any) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    worker = TinkerTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=model,
                load_tokenizer=False,
                use_remove_padding=True,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                model_dtype="fp32",
                use_torch_compile=False,
                mixed_precision=fp32,
                use_dynamic_bsz=True,
                max_token_len_per_gpu=4096,
                infer_max_token_len_per_gpu=4096,
                **engine,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def log_probs(worker: Any, case: dict[str, Any], routes: Any) -> list[float]:
    """Of the tokens behind the prompt; the sequence goes in twice, so that packing is exercised too."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    def twice(values: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([values, values], layout=torch.jagged)

    tokens, cut = torch.tensor(case["tokens"]), case["prompt_len"]
    mask = torch.ones(len(tokens) - cut, dtype=torch.long)
    fields = {
        "prompts": twice(tokens[:cut]),
        "responses": twice(tokens[cut:]),
        "input_ids": twice(tokens),
        "position_ids": twice(torch.arange(len(tokens))),
        "response_mask": twice(mask),
        "loss_mask": twice(mask),
    }
    if routes is not None:
        fields["routed_experts"] = twice(routes)
    batch = TensorDict(fields, batch_size=2)
    tu.assign_non_tensor(batch, temperature=1.0, compute_loss=False, use_fused_kernels=False)
    first, second = response_from_nested(worker.infer_batch(batch)["log_probs"], batch["response_mask"]).unbind()
    assert torch.allclose(first, second, atol=1e-5)
    return first.tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])
