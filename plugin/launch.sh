#!/bin/sh
# Starts the MCP server from this checkout's environment. The working directory stays the user's project, whose paths a run may name;
# -P keeps packages of that project from shadowing ours.
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python="$root/.venv/bin/python"
if [ ! -x "$python" ]; then
  echo "lego-rl is not installed in $root: run 'make install' there, then reconnect with /mcp" >&2
  exit 1
fi
exec "$python" -P -m plugin.mcp_server "$@"
