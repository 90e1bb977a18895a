"""What a network plug-in with policies does, as far as sandboxes need it: egress of pods, decided on the bridge that they hang on.

A frame from a pod passes when its address belongs to a pod that no policy of direction Egress selects, or to one whose policies name the
destination by `ipBlock` of one address and TCP port. All else is dropped, from unknown addresses too, so a new pod is closed until its
policies were read. ARP passes. What a policy says beyond that counts as not said: closed.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

_PERIOD_S = 0.2
Object = dict[str, Any]


def enforce(get: Callable[[str], Object], env: Mapping[str, str]) -> threading.Event:
    """Start a thread that follows pods and policies until the returned event is set. The bridge is closed when this returns."""
    ended = threading.Event()
    _apply(rules([], []), env)

    def follow() -> None:
        last = ""
        while not ended.wait(_PERIOD_S):
            pods, policies = get("/api/v1/pods"), get("/apis/networking.k8s.io/v1/networkpolicies")
            wanted = rules(pods.get("items", []), policies.get("items", []))
            if wanted != last:
                _apply(wanted, env)
                last = wanted

    threading.Thread(target=follow, daemon=True).start()
    return ended


def rules(pods: list[Object], policies: list[Object]) -> str:
    """The nft ruleset for these pods and policies."""
    lines = []
    for pod in pods:
        address = pod.get("status", {}).get("podIP")
        if not address or pod["status"].get("phase") in ("Succeeded", "Failed"):
            continue
        selecting = [policy for policy in policies if _selects(policy, pod)]
        if not selecting:
            lines.append(f"ip saddr {address} accept")
        lines += [f"ip saddr {address} ip daddr {host} tcp dport {port} accept" for policy in selecting for host, port in _allowed(policy)]
    body = "\n    ".join(["type filter hook prerouting priority 0; policy accept;", "ether type arp accept", *sorted(lines), "drop"])
    return f"table bridge lego\ndelete table bridge lego\ntable bridge lego {{\n  chain pods {{\n    {body}\n  }}\n}}\n"


def _selects(policy: Object, pod: Object) -> bool:
    spec, labels = policy["spec"], pod["metadata"].get("labels", {})
    wanted = spec.get("podSelector", {}).get("matchLabels", {})
    same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
    return same and "Egress" in spec.get("policyTypes", []) and all(labels.get(name) == value for name, value in wanted.items())


def _allowed(policy: Object) -> list[tuple[str, int]]:
    found = []
    for rule in policy["spec"].get("egress") or []:
        hosts = [peer["ipBlock"]["cidr"].removesuffix("/32") for peer in rule.get("to", []) if "ipBlock" in peer]
        ports = [port["port"] for port in rule.get("ports", []) if port.get("protocol", "TCP") == "TCP"]
        found += [(host, port) for host in hosts for port in ports if "/" not in host and isinstance(port, int)]
    return found


def _apply(ruleset: str, env: Mapping[str, str]) -> None:
    subprocess.run(["nft", "-f", "-"], input=ruleset, text=True, check=True, env=env)
