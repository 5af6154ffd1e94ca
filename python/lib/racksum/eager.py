"""Decorators that keep Dynamo, the compiler of torch, from compiling racksum's functions.

While compiled code runs, Dynamo compiles every Python function that this code calls, also through
C++: a backend's collectives, a hook, the ``wait`` of a work. It would call them with fake tensors,
whose sizes are symbols and which have no memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, TypeVar, cast

__all__ = ["eager", "eager_methods"]

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C", bound=type)


def eager(function: F) -> F:
    """Returns the function, wrapped so that Dynamo compiles neither it nor what it calls."""
    import torch  # noqa: PLC0415 - Dynamo is a part of torch.

    # `torch.compiler.disable` would import Dynamo now, which takes as long as importing torch.
    # A torch that lacks `_disable_dynamo` is older than Dynamo.
    disable = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return function
    from torch._C._dynamo import eval_frame  # noqa: PLC0415 - this does not import Dynamo.

    # The first call of `disabled` imports Dynamo. A thread with a callback has imported it before.
    disabled = disable(function)
    # Dynamo compiles only in threads that have a callback. Older PyTorch cannot tell whether a
    # thread has one, so there an imported Dynamo counts as a callback.
    get_callback = getattr(eval_frame, "get_eval_frame_callback", _dynamo_if_imported)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return (function if get_callback() is None else disabled)(*args, **named)

    # Compiled code then calls this function without tracing it, directly and through C++.
    vars(call)["_torchdynamo_disable"] = True
    _skip(cast("Any", call).__code__)
    return cast("F", call)


def _dynamo_if_imported() -> ModuleType | None:
    """Returns Dynamo's module, or None if it has not been imported."""
    return sys.modules.get("torch._dynamo")


def _skip(code: CodeType) -> None:
    """Tells Dynamo not to compile frames of this code. It still compiles what they call."""
    from torch._C._dynamo import eval_frame  # noqa: PLC0415 - this does not import Dynamo.

    if hasattr(eval_frame, "skip_code"):
        eval_frame.skip_code(code)
    else:
        # PyTorch 2.7 and newer.
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)


def eager_methods(cls: C) -> C:
    """Decorates a class so that Dynamo does not compile the methods that other code calls.

    These are the public methods, and the private methods that override those of a base class.
    """
    for name, member in list(vars(cls).items()):
        overrides = any(hasattr(base, name) for base in cls.__mro__[1:])
        if name.startswith("__") or (name.startswith("_") and not overrides):
            continue
        if isinstance(member, property):
            setattr(cls, name, property(member.fget and eager(member.fget), doc=member.__doc__))
        elif callable(member) and not isinstance(member, type):
            setattr(cls, name, eager(member))
    return cls
