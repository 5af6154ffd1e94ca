"""Delays all packets of a host: `delay.py OUTER INNER MILLISECONDS`.

Creates the TUN device `slow0` in each of two network namespaces and forwards packets between them,
each after half of the given round-trip time. Prints a line once both devices exist.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def open_tun(namespace):
    """Creates the device in a namespace and returns its descriptor, which stays valid elsewhere."""
    with open(f"/run/netns/{namespace}") as entered:
        if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"slow0", IFF_TUN | IFF_NO_PI))
    return device


def main():
    outer, inner, round_trip_ms = sys.argv[1], sys.argv[2], float(sys.argv[3])
    delay = round_trip_ms / 2000
    ends = [open_tun(outer), open_tun(inner)]
    print("ready", flush=True)
    # Per direction, packets in the order of their due times.
    waiting = collections.deque()
    while True:
        due = waiting[0][0] - time.monotonic() if waiting else None
        readable, _, _ = select.select(ends, [], [], None if due is None else max(due, 0))
        now = time.monotonic()
        for end in readable:
            packet = os.read(end, 65536)
            waiting.append((now + delay, ends[1 - ends.index(end)], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, to, packet = waiting.popleft()
            try:
                os.write(to, packet)
            except OSError:
                pass  # A full queue drops packets, and so does a device that is not up yet.


if __name__ == "__main__":
    main()
