"""A Linux kernel of its own, in user mode, for what the kernel of a machine may not have: version 2 of cgroups alone."""
