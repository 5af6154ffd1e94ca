"""Events that PyTorch's profiler shows of collectives, from their call to their end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch.autograd.profiler import record_function
from torch.futures import Future

from racksum.errors import WaitTimeout
from racksum.torch.work import do_waiting, own_streams_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from racksum.torch.work import Waits

__all__ = ["Event", "event_of"]


def event_of(collective: str) -> Event | None:
    """An event that begins now, if this thread is profiled."""
    is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return Event(f"racksum:{collective}") if is_profiled else None


class Event:
    """An event of a collective, which ends on another thread once the collective has ended."""

    def __init__(self, name: str) -> None:
        self._at_end: Future[None] = Future()
        self._ended = threading.Event()
        with record_function(name) as record:
            # What only begins and ends would be cut to the op of torch that it begins in.
            record._call_end_callbacks_on_future(self._at_end)

    def end_after(self, parts: Sequence[Waits], devices: set[torch.device]) -> Event:
        """Ends the event once these have ended, well or not, on streams of its own."""

        def end() -> None:
            try:
                with own_streams_on(devices):
                    for part in parts:
                        part.wait()
            finally:
                self.end()

        try:
            do_waiting(end)
        except RuntimeError:
            # No thread starts: better that the event is too short than that the collective is lost.
            self.end()
        return self

    def end(self) -> None:
        """Ends the event."""
        self._at_end.set_result(None)
        self._ended.set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end, so that whoever has waited for the collective finds the event."""
        if not self._ended.wait(timeout):
            raise WaitTimeout("the profiler has yet to hear that the collective has ended")
