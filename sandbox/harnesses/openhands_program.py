"""`python -I -B -c THIS TREE`: one conversation of the OpenHands SDK's default agent. The order, a JSON object, comes over standard input.

The harness is unmodified: the SDK's command-line preset with its built-in sub-agents and its default condenser. Every event is printed as
a line of JSON. The key is neither in the arguments nor in the environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any


def main(tree: str) -> None:
    order: dict[str, Any] = json.load(sys.stdin)
    sys.path.append(tree)
    from openhands.sdk import LLM, Agent, Conversation
    from openhands.tools.preset.default import get_default_condenser, get_default_tools, register_builtins_agents
    from pydantic import SecretStr

    llm = LLM(
        model="openai/policy",
        api_key=SecretStr(order["key"]),
        base_url=order["url"],
        usage_id="agent",
        native_tool_calling=True,
        max_input_tokens=order["max_input_tokens"],
    )
    condenser = get_default_condenser(llm.model_copy(update={"usage_id": "condenser"}))
    register_builtins_agents(enable_browser=False)
    agent = Agent(
        llm=llm,
        tools=get_default_tools(enable_browser=False, enable_sub_agents=True),
        system_prompt_kwargs={"cli_mode": True},
        condenser=condenser.model_copy(update={"max_tokens": order["max_input_tokens"]}),
    )
    conversation = Conversation(
        agent=agent,
        workspace=order["workspace"],
        callbacks=[lambda event: print(event.model_dump_json(), flush=True)],
        visualizer=None,
    )
    print(json.dumps({"kind": "Began", "version": importlib.metadata.version("openhands-sdk")}), flush=True)
    conversation.send_message(order["instruction"])
    conversation.run()
    status, cost = conversation.state.execution_status, conversation.conversation_stats.get_combined_metrics()
    ended = {"kind": "Ended", "status": status.value, "turns": len(cost.response_latencies), "cost_usd": cost.accumulated_cost}
    print(json.dumps(ended), flush=True)
    conversation.close()
    sys.exit(0 if status.name == "FINISHED" else f"the conversation ended as {status.value}")


if __name__ == "__main__":
    main(sys.argv[1])
