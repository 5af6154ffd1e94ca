"""Decorators that keep Dynamo, torch's compiler, from compiling racksum's functions.

While compiled code runs, Dynamo compiles every Python function that the code calls, directly or
through C++, such as a backend's collectives, a hook, or the ``wait`` of a work. Dynamo would call
racksum's functions with fake tensors, which have no memory and whose sizes are symbols.
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
    """Returns the function, wrapped so that Dynamo compiles neither it nor its callees."""
    import torch  # noqa: PLC0415 - Dynamo is a part of torch.

    # `torch.compiler.disable` would import Dynamo now, which takes as long as importing torch.
    # A torch that lacks `_disable_dynamo` is older than Dynamo.
    disable = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return function
    from torch._C._dynamo import eval_frame  # noqa: PLC0415 - this does not import Dynamo.

    # `disabled` imports Dynamo when it is first called. It is called only in a thread that has a
    # callback, and such a thread has already imported Dynamo.
    disabled = disable(function)
    # Dynamo compiles only in threads that have a callback. Older PyTorch cannot tell whether a
    # thread has one, so assume that every thread has one once Dynamo is imported.
    get_callback = getattr(eval_frame, "get_eval_frame_callback", _dynamo_if_imported)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return (function if get_callback() is None else disabled)(*args, **named)

    # Makes compiled code call this function, directly or through C++, without tracing it.
    vars(call)["_torchdynamo_disable"] = True
    _skip(cast("Any", call).__code__)
    return cast("F", call)


def _dynamo_if_imported() -> ModuleType | None:
    """Returns Dynamo's module, or None if it has not been imported."""
    return sys.modules.get("torch._dynamo")


def _skip(code: CodeType) -> None:
    """Tells Dynamo not to compile this code. It still compiles functions that the code calls."""
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

    These are the public methods, and the private methods that override methods of a base class.
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
