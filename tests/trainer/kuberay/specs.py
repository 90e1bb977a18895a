"""Runs that go to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.schemas.rundir import RunDir, RunFile, write_atomic
from server.schemas.runspec import RunSpec
from server.spec import resolve

IMAGE = "registry.example/lego-rl@sha256:" + "a" * 64
RUNNER = "registry.example/lego-rl-runner@sha256:" + "b" * 64


def in_cluster(kubeconfig: Path | str = "/nowhere/kubeconfig", **more: Any) -> dict[str, Any]:
    """Overrides of any preset."""
    return {
        "trainer.launcher": "kubernetes",
        "trainer.start": "plain",
        "trainer.cluster.ray": "auto",
        "trainer.cluster.kubernetes": {"image": IMAGE, "runs": "runs", "kubeconfig": str(kubeconfig), "namespace": "rl"} | more,
        "sandbox.environment": "kubernetes",
    }


def spec_of(preset: str, kubeconfig: Path | str = "/nowhere/kubeconfig", **more: Any) -> RunSpec:
    return resolve({"extends": preset}, in_cluster(kubeconfig, **more)).spec


def lay_out(root: Path, spec: RunSpec, server_url: str = "http://127.0.0.1:9") -> tuple[RunDir, RunFile]:
    """What the server leaves for its supervisor."""
    run = RunDir(root)
    run.logs.mkdir(parents=True)
    run.spool.mkdir()
    file = RunFile(
        run_id=root.name,
        server_url=server_url,
        event_token="an-event-token",
        runner_token="a-runner-token",
        runtimes=Path("/here"),
        spec=spec,
    )
    write_atomic(run.run_file, file.model_dump_json())
    return run, file
