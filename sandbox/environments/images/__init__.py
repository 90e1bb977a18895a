"""Images of sandboxes: unpacked once into a content-addressed cache, then only read."""
