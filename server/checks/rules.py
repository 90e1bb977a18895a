"""The rules. Each is a pure function over (spec, facts) that says what it looked at: ok, or what is wrong and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..runs.plans import expected_trials, trials_per_step
from ..schemas.checks import Check, Level
from ..schemas.probes import TaskReward, TemplateClass
from ..schemas.runspec import History, Kind, RunSpec, TrainRule
from .facts import Facts, Room

TRAINER_MB = {"warm_fork": 2500, "plain": 5000}
"""Memory of the trainer's processes with a small policy, shared pages counted once (`rl bench trainer`: 2.1 GB with the warm fork):
forked ones share what they imported."""
TRIAL_DISK_MB = 0.2
"""Harbor's directory, capture and logs of one trial."""
INSTALL = "`make install`, or `uv sync --extra {room} --inexact` in the checkout"


def ok(code: str, where: str, message: str) -> Check:
    return Check(code=code, level=Level.OK, where=where, message=message)


def warning(code: str, where: str, message: str, fix: str) -> Check:
    return Check(code=code, level=Level.WARNING, where=where, message=message, fix=fix)


def error(code: str, where: str, message: str, fix: str) -> Check:
    return Check(code=code, level=Level.ERROR, where=where, message=message, fix=fix)


def skipped(code: str, where: str, message: str) -> Check:
    return Check(code=code, level=Level.SKIPPED, where=where, message=message)


def kind(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    if spec.kind is Kind.INFER:
        yield error("kind", "kind", f"runs of kind {spec.kind} are not there yet", "use kind: train or eval")


def device(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    """In a cluster of Kubernetes nobody here can look: the pods find out."""
    if spec.trainer.device == "cpu":
        return
    message = "every part of training on GPUs that runs without one is tested; a GPU it has not seen yet"
    yield warning("device", "trainer.device", message, "begin with a run of three steps (docs/training.md, Train on GPUs)")
    if facts.device is not None and facts.device.value is None:
        problem = f"the trainer's environment cannot say whether it can train on GPUs: {facts.device.problem}"
        yield error("device", "trainer.device", problem, INSTALL.format(room="trainer"))
    elif facts.device is not None and facts.device.value is not None:
        for trouble in facts.device.value.troubles:
            yield error("device", trouble.where, trouble.message, trouble.fix)


def paths(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    for name, fact in facts.paths.items():
        section, field = name.split(".")
        path = getattr(getattr(spec, section), field)
        if not fact.exists:
            yield error("path", name, f"{path} does not exist", "give an existing directory, relative to the spec's file or absolute")
        elif not fact.is_dir:
            yield error("path", name, f"{path} is not a directory", "give the directory that holds it")
        else:
            yield ok("path", name, f"{path} exists")
    if spec.data.train is not None and spec.data.held_out is None:
        yield error("path", "data.held_out", "task directories for the held-out evaluation are missing", "set data.held_out")
    if not facts.data.writable:
        yield error(
            "data_dir", "data directory", f"{facts.data_dir} cannot be written", "make it writable or start the server with --data-dir"
        )


def ports(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    if facts.bind_problem:
        fix = "allow listening on 127.0.0.1: proxy and runner need a port each"
        yield error("ports", "machine", f"no port of 127.0.0.1 can be bound: {facts.bind_problem}", fix)
    else:
        yield ok("ports", "machine", "ports of 127.0.0.1 can be bound")


def memory(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    trainer = TRAINER_MB[spec.trainer.start]
    worst = trainer + spec.sandbox.concurrency * spec.sandbox.limits.memory_mb
    if facts.memory_mb < trainer:
        fix = "free memory, or use trainer.start: warm_fork" if spec.trainer.start == "plain" else "free memory"
        yield error("memory", "machine", f"{facts.memory_mb} MB are available, the trainer alone takes about {trainer} MB", fix)
    elif facts.memory_mb < worst:
        where = f"{facts.memory_mb} MB are available, trainer and {spec.sandbox.concurrency} sandboxes may take up to {worst} MB"
        yield warning(
            "memory", "sandbox.concurrency", where, "lower sandbox.concurrency or sandbox.limits.memory_mb if sandboxes use their limit"
        )
    else:
        yield ok("memory", "machine", f"{facts.memory_mb} MB are available, up to {worst} MB may be used")


def disk(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    need = int(200 + TRIAL_DISK_MB * expected_trials(spec) + spec.sandbox.concurrency * spec.sandbox.limits.disk_mb)
    where = f"{facts.disk_mb} MB are free in {facts.data_dir}, the run may take up to {need} MB"
    if facts.disk_mb < need:
        yield error("disk", "data directory", where, "free space, or start the server with --data-dir on another disk")
    else:
        yield ok("disk", "data directory", where)


def rooms(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    yield from _room("trainer", facts.trainer, facts.pins["trainer"])
    yield from _room("sandbox", facts.sandbox, facts.pins["sandbox"])


def model(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    if facts.model is None or not _complete(facts.trainer):
        yield skipped("model", "model", "not looked at: the trainer is not installed")
        return
    found = facts.model.value
    if found is None or found.problem:
        problem = found.problem if found else facts.model.problem
        yield error(
            "model", "model.path", f"{spec.model.path} cannot be used: {problem}", "give a checkpoint directory or a `builtin:` policy"
        )
        return
    yield ok("model", "model.path", f"{spec.model.path} has a configuration and a tokenizer")
    match found.template:
        case TemplateClass.APPEND_ONLY:
            yield ok("template", "model.renderer", "the chat template is append-only: every prompt begins with what came before")
        case TemplateClass.STRIPS:
            yield _stripping(spec)
        case _:
            message = "the chat template rewrites earlier turns: every turn becomes a branch of its own"
            yield warning("template", "model.renderer", message, "use a model whose template appends")
    if spec.capture.history is History.STRIP and not spec.model.thinking:
        message = "there is no reasoning to strip, and the template's empty thinking block would stay where a deployment drops it"
        yield error("history", "capture.history", message, "set capture.history: keep, or model.thinking: true")
    if found.round_trip:
        yield error(
            "tool_calls", "model.renderer", f"a tool call does not survive renderer and parser: {found.round_trip}", "use another renderer"
        )
    else:
        yield ok("tool_calls", "model.renderer", "tool calls survive the way through renderer and parser")
    if spec.algorithm.routing_replay and not found.experts:
        yield error("routing_replay", "algorithm.routing_replay", "the model is dense: there is no routing to replay", "set it to false")
    if found.experts and not spec.algorithm.routing_replay:
        message = f"the model has {found.experts} experts and their routing is not replayed: rollout and trainer will disagree"
        yield warning("routing_replay", "algorithm.routing_replay", message, "set it to true")


def _stripping(spec: RunSpec) -> Check:
    """Both histories are exact; they train different policies."""
    drops = "the chat template drops thinking of earlier turns"
    if spec.capture.history is History.KEEP:
        message = (
            f"{drops}, capture.history: keep leaves it in: a deployment that renders prompts anew shows the policy less than training does"
        )
        return warning("template", "capture.history", message, "set it to strip, or model.thinking: false where the policy allows it")
    if spec.capture.train is TrainRule.PARENT_EXACT:
        message = f"{drops} with every user message, and capture.train: parent_exact leaves out what follows the second one"
        return warning("template", "capture.train", message, "set it to all_branches")
    return ok("template", "capture.history", f"{drops}; capture.history: strip does the same: every user message starts a branch")


def sampling(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    """A cut distribution gives each token more probability than the trainer computes for it, so every ratio would be off."""
    cut = "rollout.top_p" if spec.rollout.top_p < 1 else "rollout.top_k" if spec.rollout.top_k else None
    if cut is None:
        return
    if spec.kind is Kind.TRAIN:
        message = f"the ratio of {spec.algorithm.loss} needs log-probabilities of the whole distribution, this samples from a part of it"
    else:
        message = "the engines sample from the whole distribution, as in training"
    yield error("sampling", cut, message, "set top_p: 1 and top_k: 0")


def routes(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    """Expert routes of a step, if every rollout grows to the context: tokens × layers × top_k, two bytes each on their way to the trainer.

    On long contexts they outgrow everything else that a rollout carries (public reports speak of 45 GB broadcasts).
    """
    found = facts.model.value if facts.model else None
    if found is None or not (spec.algorithm.routing_replay and found.experts and found.layers and found.top_k):
        return
    megabytes = math.ceil(trials_per_step(spec) * spec.model.context * found.layers * found.top_k * 2 / 1e6)
    message = f"the expert routes of a step take up to {megabytes} MB"
    if megabytes > facts.memory_mb / 2:
        fix = "lower rollout.tasks_per_step, rollout.group_size or model.context"
        yield warning("routes", "algorithm.routing_replay", f"{message}, {facts.memory_mb} MB are available", fix)
    else:
        yield ok("routes", "algorithm.routing_replay", message)


def trained_with(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    """Weights that learned under one history policy or template are another policy under a different one."""
    if facts.model is None or facts.model.value is None or (before := facts.model.value.trained_with) is None:
        return
    now = {"model.renderer": spec.model.renderer, "model.thinking": spec.model.thinking, "capture.history": str(spec.capture.history)}
    then = {"model.renderer": before.renderer, "model.thinking": before.thinking, "capture.history": before.history}
    say = error if spec.kind is Kind.EVAL else warning
    for field in (field for field in now if now[field] != then[field]):
        yield say(
            "trained_with",
            field,
            f"{field} is {now[field]}, but run {before.run_id} trained these weights with {then[field]}",
            f"set {field}={str(then[field]).lower()}",
        )


def context(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    """Prompt and completions share `model.context`."""
    found = facts.model.value if facts.model else None
    if found is None or found.problem:
        return
    if found.longest is not None and spec.model.context > found.longest:
        yield error(
            "context",
            "model.context",
            f"{spec.model.context} tokens, the model allows {found.longest}",
            f"set it to {found.longest} or less",
        )
    for name, prompt in found.prompt_tokens.items():
        room = spec.model.context - prompt
        first = f"the first prompt of {name} takes {prompt} of {spec.model.context} tokens"
        if room < spec.rollout.max_new_tokens:
            yield error("context", "model.context", f"{first}, which leaves no room for one turn", "raise model.context")
        else:
            yield ok("context", "model.context", first)


def harnesses(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    if facts.harnesses is None or not _complete(facts.sandbox):
        yield skipped("harness", "harnesses", "not looked at: the sandbox is not installed")
        return
    if facts.harnesses.value is None:
        yield error(
            "harness", "harnesses", f"the sandbox does not say which harnesses it has: {facts.harnesses.problem}", "see `rl harness list`"
        )
        return
    known = {runtime.name: runtime for runtime in facts.harnesses.value}
    for number, harness in enumerate(spec.harnesses):
        where, runtime = f"harnesses.{number}", known.get(harness.name)
        if harness.adapter:
            yield skipped("harness", where, f"not looked at: {harness.name} is an adapter of your own, {harness.adapter}")
        elif runtime is None:
            yield error("harness", where, f"there is no harness {harness.name}", f"use one of: {', '.join(sorted(known))}")
        elif runtime.version != harness.version:
            message = f"{harness.name} is pinned at {runtime.version}, the spec asks for {harness.version}"
            yield error("harness", f"{where}.version", message, f"set version: {runtime.version}")
        elif not runtime.installed:
            yield error("harness", where, f"{harness.name} {harness.version} is not installed", f"`rl harness install {harness.name}`")
        elif runtime.problem:
            yield error("harness", where, runtime.problem, f"`rl harness install {harness.name} --again`")
        else:
            yield ok("harness", where, f"{harness.name} {harness.version} is installed")


def grading(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    """A sandbox starts; the reference solution scores 1 and doing nothing scores 0 on sampled tasks."""
    if facts.selftest is None or not _complete(facts.sandbox):
        reason = "left out on request" if facts.selftest is None else "the sandbox is not installed"
        yield skipped("sandbox", "sandbox", f"no sandbox was started: {reason}")
        return
    found = facts.selftest.value
    problems = found.problems if found else [facts.selftest.problem]
    if found is None or problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        message = f"a sandbox cannot be used: {' '.join(problems[0].split())}{more}"
        yield error("sandbox", "sandbox", message, "see `python -m sandbox.cli selftest` and the README's requirements")
        return  # what was graded all the same says nothing
    yield ok("sandbox", "sandbox", f"sandboxes start, limits by {found.limits_mode}")
    if found.limits_mode == "rlimit":
        message = "limits are set per process: memory and processes of a sandbox as a whole are not bounded"
        yield warning("limits", "sandbox.limits", message, "run as root or with a delegated control group to bound whole sandboxes")
    yield from _rewards("oracle", found.oracle, 1, "the reference solution")
    yield from _rewards("noop", found.noop, 0, "doing nothing")


RULES = (kind, device, paths, ports, memory, disk, rooms, model, sampling, routes, trained_with, context, harnesses, grading)


def _complete(room: Room) -> bool:
    return not room.problem and None not in room.versions.values()


def _room(name: str, room: Room, pins: object) -> Iterator[Check]:
    assert isinstance(pins, dict)  # noqa: S101
    fix = INSTALL.format(room=name)
    if room.problem:
        yield error(name, f"{name} environment", f"{room.python} does not answer: {room.problem}", fix)
        return
    missing = [package for package, version in room.versions.items() if version is None]
    other = [
        f"{package} {version} in place of {pins[package]}"
        for package, version in room.versions.items()
        if version not in (None, pins[package])
    ]
    if missing:
        yield error(name, f"{name} environment", f"not installed in {room.python}: {', '.join(missing)}", fix)
    elif other:
        yield warning(name, f"{name} environment", f"other versions than this program was made for: {', '.join(other)}", fix)
    else:
        yield ok(name, f"{name} environment", f"all {len(pins)} pinned packages are there")


def _rewards(code: str, graded: list[TaskReward], expected: int, what: str) -> Iterator[Check]:
    wrong = [
        (f"{task.task} scored {task.reward:g}" if task.reward is not None else f"{task.task} got no verdict")
        + (f" ({task.detail})" if task.detail else "")
        for task in graded
        if task.reward != expected
    ]
    if wrong:
        yield error(
            code, "data", f"{what} must score {expected}: {', '.join(wrong)}", "repair the task's tests or solution before training on it"
        )
    elif graded:
        yield ok(code, "data", f"{what} scores {expected} on {len(graded)} sampled tasks")
