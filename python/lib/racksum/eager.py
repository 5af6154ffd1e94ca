"""Functions that Dynamo leaves alone: C++ calls them, or they call the extension.

While compiled code runs, Dynamo compiles every Python function that is called from it, also from
C++: a backend's collectives, a hook, a work's ``wait``. It would hand them tensors that only stand
for others: their sizes are symbols, and they have no memory.
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
    """Keeps Dynamo from compiling a function, and all that it calls."""
    import torch  # noqa: PLC0415 - whoever has no torch has no Dynamo.

    # `torch.compiler.disable` would import Dynamo now, which takes as long as importing torch does.
    # What is older than Dynamo has none to be kept from.
    disable = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return function
    from torch._C._dynamo import eval_frame  # noqa: PLC0415 - as above; this imports no Dynamo.

    # Its first call imports Dynamo, which a thread with a callback has done before.
    disabled = disable(function)
    # Dynamo compiles nothing in a thread that has no callback. Older PyTorch cannot say whether a
    # thread has one: there, an imported Dynamo counts as one.
    get_callback = getattr(eval_frame, "get_eval_frame_callback", _dynamo_if_imported)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return (function if get_callback() is None else disabled)(*args, **named)

    # Compiled code calls this without looking into it, and so does C++ that compiled code calls.
    vars(call)["_torchdynamo_disable"] = True
    _skip(cast("Any", call).__code__)
    return cast("F", call)


def _dynamo_if_imported() -> ModuleType | None:
    """Returns Dynamo's module, or None before anyone has imported it."""
    return sys.modules.get("torch._dynamo")


def _skip(code: CodeType) -> None:
    """Has Dynamo never compile a frame of this code, though what the frame calls."""
    from torch._C._dynamo import eval_frame  # noqa: PLC0415 - as above.

    if hasattr(eval_frame, "skip_code"):
        eval_frame.skip_code(code)
    else:
        # Since PyTorch 2.7.
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)


def eager_methods(cls: C) -> C:
    """Keeps Dynamo from compiling the methods of a class that others call: a decorator.

    Those are the public ones, and those that the class overrides.
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
