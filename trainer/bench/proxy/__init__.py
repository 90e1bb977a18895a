"""What the proxy adds to a model call: HTTP, rendering, parsing and capture, over calling the engine directly.

Three processes: this one makes the load, `host` is the proxy alone, `engine` answers at once. All traffic is seeded.
"""
