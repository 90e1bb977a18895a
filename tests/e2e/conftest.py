from tests.trainer.conftest import policy

__all__ = ["policy"]
