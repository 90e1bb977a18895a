"""One file per noun. Reading and writing are guarded by the routers' dependencies."""
