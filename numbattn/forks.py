"""Locks and fork: of all threads one goes on in the child, where nobody would ever release what the others held."""

import os
from contextlib import AbstractContextManager
from functools import partial
from typing import Any


def waits_for(lock: AbstractContextManager[Any, Any]) -> None:
    """From now on a fork waits until no other thread holds this lock: so the child finds it free, and what it guards
    whole. Made anew in the child it would guard a compiler that another thread has left half-way.

    Of two locks one of which is taken inside the other the inner one comes first. The thread that forks may hold it.
    """
    if hasattr(os, "register_at_fork"):
        release = partial(lock.__exit__, None, None, None)
        os.register_at_fork(before=lock.__enter__, after_in_parent=release, after_in_child=release)
