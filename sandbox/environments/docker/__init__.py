"""Containers of a Docker engine, through the official SDK. Its own words are used: an engine (the daemon) has images and containers.

`engine` is the boundary: blocking calls in a bounded pool of threads, and every error classified. `images` prepares what a container is
made from, `container` says how it is confined, `sandbox` is one that runs, `watch` looks after all of them, `probe` proves the walls.
"""
