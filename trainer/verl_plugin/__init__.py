"""The plug-in of verl 0.9.1, through its public registries and configuration only.

verl loads `trainer.verl_plugin.plugin` in every process (`VERL_USE_EXTERNAL_MODULES`). `import verl` comes first: a Ray worker may
unpickle one of our classes before anything of verl, and verl would then re-enter this package while it is half initialised.
"""

import verl  # noqa: F401
