"""Process groups and the store of a job."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "default_store",
    "group_of",
    "group_tag",
    "group_timeout",
    "name_group",
    "process_group",
]


def process_group(group: Any) -> Any:
    """What a functional collective names its group by, as the group."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(group)) if isinstance(group, str) else group


def group_tag(group: Any) -> str:
    """With the ranks, the name of a group that torchair writes down."""
    from torch.distributed.distributed_c10d import _get_group_tag

    return _get_group_tag(process_group(group))


def group_of(tag: str, ranks: list[int]) -> Any:
    """The process group that torchair wrote down so, or None."""
    from torch.distributed.distributed_c10d import _find_pg_by_ranks_and_tag

    return _find_pg_by_ranks_and_tag(tag, ranks)


def name_group(group: Any, backend: Any, name: str) -> None:
    """Make a process group written in Python known to functional collectives; what it lacks, `backend` does."""
    group._register_backend(torch.device("cpu"), torch.distributed.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(name)


def group_timeout(group: Any) -> Any:
    """How long ranks of a group wait for each other; None where its backend does not say."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None


def default_store() -> Any:
    """Where the ranks of the job can leave words for each other, apart from collectives."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
