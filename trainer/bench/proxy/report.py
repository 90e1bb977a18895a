"""The measurements for a person to read."""

from __future__ import annotations

from typing import Any


def text(result: dict[str, Any]) -> str:
    slopes, long, routes, machine = (result[name] for name in ("slopes", "long_session", "routes", "machine"))
    lines = [_row("lego-rl", row) for row in result["rows"]]
    lines += [_row(other["server"], row) + f"  (ours x {row['ratio']:.1f})" for other in result["against"] for row in other["rows"]]
    direct = ", ".join(f"{item['p50_ms']:.2f} / {item['p99_ms']:.2f} ms" for item in result["direct"])
    busy = " (busy: take the figures as upper bounds)" if machine["load_after"] > machine["cpus"] else ""
    return "\n".join(
        [
            *lines,
            f"direct calls to the engine, median / p99 of each row: {direct}",
            f"CPU per turn: {slopes['base_us']:.0f} us + {slopes['us_per_kb_sent']:.2f} us per KB sent "
            f"+ {slopes['us_per_1k_tokens_captured']:.3f} us per 1,000 tokens captured",
            f"a session of {long['turns']} turns and {long['tokens']:,} tokens: {long['bytes'] / 1e6:.1f} MB, "
            f"{long['bytes_per_token']:.1f} bytes per token; routes {routes['route_bytes_per_token']:.0f} bytes per token",
            f"{machine['cpus']} CPUs, load average {machine['load_before']:.1f} before and {machine['load_after']:.1f} after{busy}",
        ]
    )


def _row(server: str, row: dict[str, Any]) -> str:
    floor = f" (a server that passes bodies by: +{row['floor_p50_ms']:.2f} ms)" if "floor_p50_ms" in row else ""
    return (
        f"{server:18s} {row['sessions']:3d} sessions at {row['rate']:g}/s: +{row['added_p50_ms']:.2f} ms median{floor}, "
        f"+{row['added_p99_ms']:.2f} ms p99; {row['rps_per_core']:,.0f} calls/s per core, {row['rss_mb']:.0f} MB"
    )
