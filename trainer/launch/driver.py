"""The launcher's course: read the run, start verl with its own Ray cluster, see it off.

Everything that verl, Ray and their libraries print goes to `logs/verl.log`; the launcher's own output is a line per step and the reason
of a failure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from server.schemas.events import RunStateBody
from server.schemas.rundir import CheckpointFile, RunDir, RunFile
from server.schemas.runspec import Kind, RunSpec
from server.schemas.spool import Reporter
from server.schemas.states import RunState
from server.schemas.tasks import TRAIN
from trainer.checkpoints import kept
from trainer.policies import PREFIX, resolve
from trainer.rollout.tasks import read_index

from . import FAILED, FINAL, PERHAPS, PROGRESS_LOG, TERMINATED, FinalError, environment, preflight, zygote
from .config import Place, overrides

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""A checkpoint has one of these: the tensors, or the index of several files of them."""
DIED = {("ray.exceptions", "ActorDiedError"), ("ray.exceptions", "OutOfMemoryError")}
"""Ray's errors whose text is a page; Ray need not be imported yet. torch has another OutOfMemoryError, which says what it is about."""
RUNNER_S = 180
"""How long the runner may take to prepare its tasks and listen."""
LONGEST_TEMP = 40
"""Ray puts sockets some 65 characters below its temporary directory, and a socket's path has at most 107."""


def launch(root: Path, attempt: int = 1) -> int:
    """Run to the end, a later attempt from the last checkpoint; 0 when all steps were done. What ends the run is printed and reported."""
    run = RunDir(root.resolve())
    try:
        file = run.load()
    except (OSError, ValueError) as error:
        print(f"failed: {run.run_file} cannot be read: {error}", file=sys.stderr)
        return FINAL
    run.logs.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, _terminate)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    try:
        with _noise_to(run.logs / "verl.log"):
            try:
                _train(run, file, attempt, out)
            except Exception:
                traceback.print_exc()
                raise
    except FinalError as error:  # Ray's own error for one that was raised in another process is one too
        return _failed(run, file, str(error) if type(error) is FinalError else _reason(error), out, FINAL)
    except SystemExit:
        print("terminated", file=out)
        return TERMINATED
    except Exception as error:  # noqa: BLE001 whatever stopped verl becomes the run's reason; the traceback is in verl.log
        return _failed(run, file, _reason(error), out, FAILED)
    trained = f"{file.spec.trainer.steps} steps, weights in {run.checkpoints / 'final'}"
    print(f"done: {trained if file.spec.kind is Kind.TRAIN else 'evaluated'}", file=out)
    return 0


def _train(run: RunDir, file: RunFile, attempt: int, out: TextIO) -> None:
    spec = file.spec
    if spec.kind is Kind.INFER:
        raise FinalError(f"kind {spec.kind.value!r} is not run by the trainer yet: use kind 'train' or 'eval'")
    if spec.rollout.top_p < 1 or spec.rollout.top_k:
        raise FinalError("rollout.top_p and top_k: the trainer's ratios are those of the whole distribution; set top_p: 1 and top_k: 0")
    model = _model(spec.model.path)
    if spec.rollout.engine == "vllm" and spec.algorithm.routing_replay and not preflight.experts(preflight.language_config(model)):
        raise FinalError(f"algorithm.routing_replay: {model} has no experts whose routes could be replayed: set it to false")
    environment.apply(spec.trainer.device, own_cluster=spec.trainer.cluster.ray == "local")
    _prepare_trackers(run, spec)
    if found := [f"{trouble.where}: {trouble.message}: {trouble.fix}" for trouble in preflight.troubles(spec)]:
        raise FinalError("; ".join(found))
    warm = spec.trainer.start == "warm_fork"
    if warm and (reason := zygote.obstacle()):
        print(f"warm_fork is not available ({reason}): starting plainly", file=sys.stderr)
        warm = False
    with _ray_temp(run, attempt) as temp, contextlib.ExitStack() as stack:
        executable = None
        if warm:
            zygote.preload()
            parent = zygote.start(temp, zygote.PROXY)
            stack.callback(parent.stop)
            executable = parent.executable
            sys.executable = str(executable)
        stack.enter_context(_followed(run.logs / PROGRESS_LOG, out))  # starts a thread, so it comes after the fork
        _wait_for_runner(run)
        _check_tasks(run, spec)
        step = _last_step(run) if attempt > 1 else 0
        _drive(file, Place(run, file.run_id, model, temp, executable, attempt, step))


def _drive(file: RunFile, place: Place) -> None:
    """verl's own main, given the configuration that its hydra decorator would have composed from the same overrides."""
    import ray
    import verl.trainer.main_ppo as main_ppo
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(main_ppo.__file__).parent / "config"), version_base=None):
        config = compose("ppo_trainer", overrides(file.spec, place))
    try:
        main_ppo.main(config)
    finally:
        signal.alarm(0)  # the handler that Ray's C++ part puts in front of ours would abort the process 3 s after a SIGTERM
        ray.shutdown()
    if file.spec.kind is Kind.TRAIN:
        _link_final_weights(place.run, file.spec.trainer.steps)


def _last_step(run: RunDir) -> int:
    """The number of updates in the last whole checkpoint."""
    try:
        return CheckpointFile.model_validate_json(run.latest_checkpoint.read_bytes()).step
    except (OSError, ValueError) as error:
        raise FinalError(f"there is no checkpoint to go on from: {run.latest_checkpoint}: {error}") from error


def _link_final_weights(run: RunDir, steps: int) -> None:
    """`checkpoints/final` names the weights after the last step; that they are there proves that it was done."""
    weights = kept.weights(run, steps)
    if not any((weights / name).is_file() for name in WEIGHTS):
        raise FinalError(f"verl ended without its last step: see {run.logs / 'verl.log'}")
    (run.checkpoints / "final").unlink(missing_ok=True)
    (run.checkpoints / "final").symlink_to(weights.relative_to(run.checkpoints))


def _model(name: str) -> Path:
    try:
        path = resolve(name) if name.startswith(PREFIX) else Path(name)
    except ValueError as error:
        raise FinalError(f"model.path: {error}") from error
    if not (path / "config.json").is_file():
        raise FinalError(f"model.path {name!r} is no checkpoint directory: {path / 'config.json'} does not exist")
    return path


def _prepare_trackers(run: RunDir, spec: RunSpec) -> None:
    for tracker in spec.reporting.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise FinalError(f"reporting.trackers: {tracker} is not installed beside the trainer: install it, or leave it out")
    if spec.reporting.trackers:
        (run.root / "tracking").mkdir(exist_ok=True)
        os.environ.update(environment.of_trackers(run))


def _wait_for_runner(run: RunDir) -> None:
    deadline = time.monotonic() + RUNNER_S
    while not run.runner_file.exists():
        if time.monotonic() > deadline:
            raise FinalError(f"the sandbox runner did not write {run.runner_file} within {RUNNER_S} s: see its log in {run.logs}")
        time.sleep(0.05)


def _check_tasks(run: RunDir, spec: RunSpec) -> None:
    tasks = len(read_index(run.tasks / TRAIN / "index.jsonl"))
    if spec.kind is Kind.TRAIN and tasks < spec.rollout.tasks_per_step:
        raise FinalError(
            f"a step needs {spec.rollout.tasks_per_step} tasks but there are only {tasks}: lower rollout.tasks_per_step or add tasks"
        )


@contextlib.contextmanager
def _ray_temp(run: RunDir, attempt: int) -> Iterator[Path]:
    """Ray's temporary directory lies in the run's; a run too deep for a socket path gets a short link to it. Each attempt has its own: the
    sockets of a killed one are still there."""
    home = run.root / ("ray" if attempt == 1 else f"ray-{attempt}")
    home.mkdir(mode=0o700, exist_ok=True)
    if len(str(home)) <= LONGEST_TEMP:
        yield home
        return
    with tempfile.TemporaryDirectory(prefix="lego-") as short:
        link = Path(short) / "ray"
        link.symlink_to(home)
        yield link


@contextlib.contextmanager
def _noise_to(path: Path) -> Iterator[None]:
    """Point the process's stdout and stderr, and so its children's, at a file."""
    saved = os.dup(1), os.dup(2)
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)


@contextlib.contextmanager
def _followed(path: Path, out: TextIO) -> Iterator[None]:
    """Copy the lines that the trainer's process appends to `path` to `out`; those of an earlier attempt stay where they are."""
    path.touch()
    ended, known = threading.Event(), path.stat().st_size

    def follow() -> None:
        with path.open() as file:
            file.seek(known)
            while True:
                last = ended.wait(0.2)
                out.write(file.read())
                out.flush()
                if last:
                    return

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _terminate(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def _reason(error: Exception) -> str:
    """One line: Ray wraps what was raised in another process and puts the traceback into the message."""
    cause = getattr(error, "cause", None) or error
    kind = type(cause)
    if (kind.__module__, kind.__name__) in DIED:
        return f"{kind.__name__}: a process of the trainer died. {PERHAPS}"
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[-1] if text else 'no message'}"


def _failed(run: RunDir, file: RunFile, reason: str, out: TextIO, code: int) -> int:
    """The trainer's process has ended, so its spool is free to be written on."""
    print(f"failed: {reason}", file=out)
    reporter = Reporter(file.server_url, file.run_id, file.event_token, "trainer", run.spool)
    reporter.report(RunStateBody(state=RunState.FAILED, reason=reason))
    reporter.close()
    return code
