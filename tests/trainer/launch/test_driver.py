"""What the launcher says about a run that cannot start: one line, reported to the server, exit code 1, nothing left running."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray.exceptions
import torch

from server.schemas.events import RunStateBody
from server.schemas.rundir import RunDir, RunFile, RunnerFile, write_atomic
from server.schemas.runspec import Algorithm, Data, Harness, Kind, Model, Reporting, Rollout, RunSpec, Trainer
from server.schemas.states import RunState
from tests.trainer.support.fake_server import FakeServer
from trainer.launch import FINAL, PERHAPS, FinalError, driver

SPEC = RunSpec(model=Model(path="builtin:none"), harnesses=[Harness(name="h", version="1")], data=Data(family="onebug"))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer("events")
    yield server
    server.stop()


def launch(root: Path, server: FakeServer, spec: RunSpec, tasks: int = 8) -> tuple[int, str]:
    run = RunDir(root)
    folder = run.tasks / "train"
    folder.mkdir(parents=True)
    (folder / "index.jsonl").write_text("\n".join(json.dumps({"task": f"t-{i}", "instruction": ""}) for i in range(tasks)))
    write_atomic(run.runner_file, RunnerFile(url="http://127.0.0.1:1", pid=0, boot="b").model_dump_json())
    file = RunFile(run_id="r", server_url=server.url, event_token="events", runner_token="t", runtimes=root, spec=spec)
    write_atomic(run.run_file, file.model_dump_json())
    done = subprocess.run([sys.executable, "-m", "trainer.launch", "--run-dir", str(root)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def checkpoint(root: Path) -> Model:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text("{}")
    return Model(path=str(root))


def test_a_directory_that_is_no_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "trainer.launch", "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == FINAL
    assert done.stderr.startswith(f"failed: {tmp_path / 'run.json'} cannot be read")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_is_not_installed_is_refused(tmp_path: Path, server: FakeServer) -> None:
    dense = Algorithm(routing_replay=False)
    spec = SPEC.model_copy(update={"model": checkpoint(tmp_path / "model"), "rollout": Rollout(engine="vllm"), "algorithm": dense})
    code, output = launch(tmp_path / "run", server, spec)
    assert code == FINAL and output.startswith("failed: rollout.engine: vLLM is not installed beside the trainer: install its CPU build")


def test_a_cut_distribution_is_refused(tmp_path: Path, server: FakeServer) -> None:
    code, output = launch(tmp_path, server, SPEC.model_copy(update={"rollout": Rollout(top_p=0.9)}))
    assert code == FINAL and output.startswith("failed: rollout.top_p and top_k: the trainer's ratios are those of the whole distribution")


def test_a_policy_that_does_not_ship(tmp_path: Path, server: FakeServer) -> None:
    code, output = launch(tmp_path, server, SPEC)
    assert code == FINAL and output.startswith("failed: model.path: no policy 'builtin:none' ships")
    (state,) = server.bodies()
    assert isinstance(state, RunStateBody) and state.state is RunState.FAILED and f"failed: {state.reason}\n" == output


def test_a_path_that_is_no_checkpoint(tmp_path: Path, server: FakeServer) -> None:
    code, output = launch(tmp_path, server, SPEC.model_copy(update={"model": Model(path=str(tmp_path / "nothing"))}))
    assert code == FINAL and "is no checkpoint directory" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu(tmp_path: Path, server: FakeServer) -> None:
    trainer, rollout, algorithm = Trainer(device="cuda"), Rollout(engine="vllm"), Algorithm(routing_replay=False)
    spec = SPEC.model_copy(update={"model": checkpoint(tmp_path / "m"), "trainer": trainer, "rollout": rollout, "algorithm": algorithm})
    code, output = launch(tmp_path / "run", server, spec)
    assert code == FINAL and output.startswith("failed: trainer.device: torch sees no GPU on this machine: look at `nvidia-smi`")


def test_routes_of_a_model_that_has_none(tmp_path: Path, server: FakeServer) -> None:
    spec = SPEC.model_copy(update={"model": checkpoint(tmp_path / "m"), "rollout": Rollout(engine="vllm")})
    code, output = launch(tmp_path / "run", server, spec)
    assert code == FINAL and "has no experts whose routes could be replayed: set it to false" in output


@pytest.mark.parametrize(
    "place",
    ["actor/huggingface/model.safetensors", "actor/huggingface/model.safetensors.index.json", "actor/model/huggingface/model.safetensors"],
)
def test_the_last_weights_are_found_in_whatever_form_a_backend_writes_them(tmp_path: Path, place: str) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(FinalError, match="verl ended without its last step"):
        driver._link_final_weights(run, 3)
    weights = run.checkpoints / "global_step_3" / place
    weights.parent.mkdir(parents=True)
    weights.touch()
    driver._link_final_weights(run, 3)
    assert (run.checkpoints / "final" / weights.name).samefile(weights)


def test_a_kind_that_is_not_trained(tmp_path: Path, server: FakeServer) -> None:
    code, output = launch(tmp_path, server, SPEC.model_copy(update={"kind": Kind.INFER}))
    assert code == FINAL and output == "failed: kind 'infer' is not run by the trainer yet: use kind 'train' or 'eval'\n"


def test_fewer_tasks_than_a_step_needs(tmp_path: Path, server: FakeServer) -> None:
    code, output = launch(tmp_path, server, SPEC.model_copy(update={"model": checkpoint(tmp_path / "m")}), tasks=3)
    assert code == FINAL and "a step needs 8 tasks but there are only 3" in output


def test_a_runner_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "RUNNER_S", 0)
    with pytest.raises(FinalError, match=r"did not write .*runner\.json within 0 s"):
        driver._wait_for_runner(RunDir(tmp_path))


def test_rays_directory_is_reached_over_a_short_path(tmp_path: Path) -> None:
    deep = RunDir(tmp_path / ("deep" * 20))
    deep.root.mkdir()
    with driver._ray_temp(deep, 1) as temp:
        assert len(str(temp)) <= driver.LONGEST_TEMP
        (temp / "file").touch()
        assert (deep.root / "ray" / "file").exists()
    assert not temp.exists()


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="mlflow is installed here")
def test_a_tracker_that_is_not_installed(tmp_path: Path, server: FakeServer) -> None:
    spec = SPEC.model_copy(update={"model": checkpoint(tmp_path / "m"), "reporting": Reporting(trackers=("tensorboard", "mlflow"))})
    code, output = launch(tmp_path / "run", server, spec)
    assert code == FINAL
    assert output == "failed: reporting.trackers: mlflow is not installed beside the trainer: install it, or leave it out\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ray.exceptions.OutOfMemoryError("a page of advice"), f"OutOfMemoryError: a process of the trainer died. {PERHAPS}"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"), "OutOfMemoryError: Tried to allocate 2 GiB"),
        (ValueError(), "ValueError: no message"),
    ],
)
def test_the_reason_of_a_crash_is_a_line(error: Exception, reason: str) -> None:
    assert driver._reason(error) == reason
