"""A harness of one's own, in a RunSpec: `{name: loop, version: "1", adapter: "loop_harness:Loop"}`. See docs/harnesses.md."""

from typing import override

from sandbox.harnesses.base import HarnessAgent
from sandbox.integrity.environment import TrialEnvironment

PROGRAM = """
import json, os, subprocess, sys, urllib.request
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run a command", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(os.environ["URL"] + "/chat/completions", body, headers))
    messages.append(json.load(answer)["choices"][0]["message"])
    print(json.dumps(messages[-1]), flush=True)
    if not messages[-1].get("tool_calls"):
        break
    for call in messages[-1]["tool_calls"]:
        command = str(json.loads(call["function"]["arguments"]).get("command"))
        output = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output[-2000:]})
"""


class Loop(HarnessAgent):
    @staticmethod
    @override
    def name() -> str:
        return "loop"

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        env = {"URL": self.api_url(environment, "/v1"), "KEY": self.rollout.proxy.key.get_secret_value()}
        await self.start(environment, ["python3", "-I", "-c", PROGRAM], env, instruction)
