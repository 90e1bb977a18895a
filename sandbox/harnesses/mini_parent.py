"""Warm parent of mini-swe-agent: imports it once, then forks one process per rollout into that rollout's sandbox.

Runs as `python -I mini_parent.py TREE REPOSITORY CONTROL_FD`, single-threaded, under the interpreter that the runtime was installed for.
The harness is unmodified: `DefaultAgent`, `LitellmModel` and `LocalEnvironment` with the shipped `mini.yaml`, as the `mini` command builds
them with `-y --exit-immediately -l 0`. A rollout's key and address reach only its child, over a socket that the parent does not read.

Protocol on CONTROL_FD (SOCK_SEQPACKET): a datagram per rollout with two descriptors, the rollout's own socket and its output pipe. On the
rollout's socket: a `ForkTarget`, then for the child a descriptor of a file with its `Order` as JSON; the parent answers with the child's
wait status as text.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any, TypedDict

# Read by the packages when they are imported. litellm's logging pool would make the parent multi-threaded; without slots it never starts.
SETTINGS = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "CRITICAL",
    "LOGGING_EXECUTOR_MAX_PENDING_TASKS": "0",
}
IN_SANDBOX = {"IS_SANDBOX": "1", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3"}
WARM_COMMANDS = ("true", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


class Order(TypedDict):
    """What one rollout is. `url` is the API base and `key` its bearer token; `output` is where the trajectory goes in the sandbox."""

    instruction: str
    url: str
    key: str
    cwd: str
    output: str
    environ: dict[str, str]


def main() -> None:
    tree, repository, control = sys.argv[1], sys.argv[2], socket.socket(fileno=int(sys.argv[3]))
    sys.path.append(repository)
    from sandbox.environments.namespace import enter, kernel

    sys.path.remove(repository)
    kernel.die_with_parent()
    os.environ.update(SETTINGS)
    sys.path.append(tree)
    config = _load(tree)
    _warm(config)
    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit("the warm parent is not single-threaded: its forks could deadlock")
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # rollouts are short; a collection touches, and so copies, much of what they share
    control.send(b"ready")
    _serve(control, config, enter, _import_path(tree))


def _import_path(tree: str) -> list[str]:
    """The standard library and the runtime: both are mounted read-only at the same place in every sandbox."""
    return [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib"), "lib-dynload")), tree]


def _load(tree: str) -> dict[str, Any]:
    import yaml

    config: dict[str, Any] = yaml.safe_load(Path(tree, "minisweagent/config/mini.yaml").read_text(encoding="utf-8"))
    config["agent"].pop("mode")  # of the interactive agent only
    config["agent"]["cost_limit"] = 0
    return config


def _run(config: dict[str, Any], order: Order) -> str:
    """One rollout; returns the harness's exit status word."""
    import litellm
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    litellm.suppress_debug_info = True
    litellm.api_key = order["key"]
    model_config = dict(config["model"])
    model_config["model_kwargs"] = model_config["model_kwargs"] | {"api_base": order["url"]}
    model = LitellmModel(model_name="openai/policy", **model_config)
    environment = LocalEnvironment(cwd=order["cwd"], **config["environment"])
    agent = DefaultAgent(model, environment, output_path=Path(order["output"]) if order["output"] else None, **config["agent"])
    return str(agent.run(order["instruction"]).get("exit_status", ""))


def _warm(config: dict[str, Any]) -> None:
    """One rollout against a scripted endpoint in a child process: everything that is imported or compiled lazily is then in place."""
    import litellm

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        pid = os.fork()
        if pid == 0:
            try:
                _scripted_endpoint(listener)
            finally:
                os._exit(0)
    try:
        _run(config, Order(instruction="warm up", url=address, key="none", cwd="/", output="", environ={}))
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    for client in list(litellm.in_memory_llm_clients_cache.cache_dict.values()):
        if hasattr(client, "close") and type(client).__name__ == "OpenAI":
            client.close()
    litellm.in_memory_llm_clients_cache.flush_cache()
    litellm.api_key = None


def _scripted_endpoint(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as reader:
            while reader.readline():
                length = 0
                while (line := reader.readline().strip()) != b"":
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                asked = json.loads(reader.read(length))
                turn = sum(message["role"] == "assistant" for message in asked["messages"])
                call = {"name": "bash", "arguments": json.dumps({"command": WARM_COMMANDS[min(turn, 1)]})}
                message = {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}]}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
                answer = {"id": "w", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice], "usage": usage}
                body = json.dumps(answer).encode()
                head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)


def _serve(control: socket.socket, config: dict[str, Any], enter: Any, import_path: list[str]) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    pid, rollout = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _tell(rollout, str(status))
                    rollout.close()
                    continue
                data, descriptors, _, _ = socket.recv_fds(control, 64, 2)
                if not data:
                    return
                if len(descriptors) != 2:  # this process is at its limit: one start fails, the others live on
                    for descriptor in descriptors:
                        os.close(descriptor)
                    continue
                rollout_fd, output = descriptors
                rollout = socket.socket(fileno=rollout_fd)
                pid = _fork(enter, rollout, output, import_path, config)
                os.close(output)
                if pid:
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, rollout))
                else:
                    rollout.close()


def _fork(enter: Any, rollout: socket.socket, output: int, import_path: list[str], config: dict[str, Any]) -> int:
    """The child's pid, or 0 when the sandbox could not be entered. The child itself never returns."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    target = enter.ForkTarget.receive(rollout)
    try:
        pid = int(enter.fork_into(target, (nothing, output, output), import_path, keep=(rollout.fileno(),)))
    except OSError as error:
        _tell(rollout, f"cannot enter the sandbox: {error}")
        pid = -1
    if pid == 0:
        _child(rollout, config)
    target.close()
    os.close(nothing)
    return max(pid, 0)


def _child(rollout: socket.socket, config: dict[str, Any]) -> None:
    try:
        _, (fd,), _, _ = socket.recv_fds(rollout, 16, 1)
        rollout.close()
        with open(fd, encoding="utf-8") as file:
            order: Order = json.load(file)
        os.environ.clear()
        os.environ.update(order["environ"] | IN_SANDBOX)
        print("exit status:", _run(config, order), flush=True)
        os._exit(0)
    except BaseException:  # the child must never return into the parent's loop
        import traceback

        traceback.print_exc()
    os._exit(1)


def _tell(rollout: socket.socket, text: str) -> None:
    try:
        rollout.send(text.encode())
    except OSError:  # the runner no longer waits for this rollout
        pass


if __name__ == "__main__":
    main()
