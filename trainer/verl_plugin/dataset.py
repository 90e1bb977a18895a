"""The task index as verl's dataset: a row names a task, nothing of the task itself passes through verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from trainer.rollout.tasks import read_index


class TaskDataset(Dataset[dict[str, Any]]):
    """Chosen by `data.custom_cls`; verl passes the index file as `data_files`."""

    def __init__(self, data_files: str, **_: Any) -> None:
        self.tasks = [entry.task for entry in read_index(Path(data_files))]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": [], "task": self.tasks[index], "index": index}
