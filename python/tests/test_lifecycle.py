"""From import to exit: threads, signals, forks, closing and lost ranks."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import racksum
from conftest import binary


def python(code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Runs a script in a new Python process."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_importing_starts_no_thread_and_needs_neither_numpy_nor_torch():
    ran = python(
        """
        import os, sys
        import racksum
        print(len(os.listdir("/proc/self/task")), "numpy" in sys.modules, "torch" in sys.modules)
        """
    )
    assert ran.stdout == "1 False False\n", ran.stderr


def test_the_package_and_the_program_are_of_one_release():
    ran = subprocess.run([binary(), "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"racksum {racksum.__version__}\n"
    assert importlib.metadata.version("racksum") == racksum.__version__


def test_closing_twice_is_closing_once_and_ops_after_it_are_refused(place):
    session = place.connect()
    assert not session.closed
    session.close()
    session.close()
    assert session.closed
    assert "closed" in repr(session)
    with pytest.raises(racksum.SessionClosed, match="the client was closed"):
        session.allreduce(np.ones(1, np.float32))
    with pytest.raises(racksum.SessionClosed), session:
        pass


def test_closing_ends_what_another_thread_waits_for(place):
    ended = threading.Event()

    def work(session):
        if session.rank == 1:
            ended.wait(60)
            return "late"
        threading.Timer(0.3, session.close).start()
        with pytest.raises(racksum.SessionClosed):
            session.allreduce(np.ones(1, np.float32))
        ended.set()
        return "closed"

    assert place.run(2, work) == ["closed", "late"]


def test_a_session_that_nobody_holds_leaves_its_job(place):
    job = place.new_job()
    place.connect(job=job)
    gc.collect()
    with place.connect(job=job) as again:
        assert again.allreduce(np.ones(1, np.float32)).tolist() == [1]


@pytest.mark.parametrize(
    "leaving",
    [
        "connected().close(); os._exit(0)",
        "connected(); os._exit(0)",
        "kept.append(connected())",
    ],
    ids=["close", "drop", "exit"],
)
def test_a_process_that_ends_after_leaving_has_left(place, leaving):
    job = place.new_job()
    code = f"""
        import os, sys
        import numpy, racksum

        kept = []

        def connected():
            session = racksum.connect(sys.argv[1], job=sys.argv[2], rank=0, world=2)
            session.allreduce(numpy.ones(1, numpy.float32))
            return session

        {leaving}
        """
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(python, code, place.address, job)
        with place.connect(job=job, rank=1, world=2) as session:
            session.allreduce(np.ones(1, np.float32))
            with pytest.raises(racksum.PeerLost, match="it left the job"):
                session.allreduce(np.ones(1, np.float32))
    assert (ran.result().returncode, ran.result().stderr) == (0, "")


def test_waiting_leaves_other_threads_alone(place):
    def work(session):
        if session.rank == 1:
            time.sleep(0.5)
            return session.allreduce(np.ones(1, np.float32)).item()
        counted = 0
        handle = session.allreduce(np.ones(1, np.float32), async_op=True)
        waiter = threading.Thread(target=handle.wait)
        waiter.start()
        while waiter.is_alive():
            counted += 1
        assert counted > 1000, "the wait blocked this thread too"
        return handle.wait().item()

    assert place.run(2, work) == [2, 2]


@pytest.mark.parametrize(
    "blocked",
    [
        "racksum.connect(sys.argv[1], job=sys.argv[2], rank=0, world=2)",
        "connected().allreduce(numpy.ones(1, numpy.float32))",
        "connected().allreduce(numpy.ones(1, numpy.float32), async_op=True).wait()",
        "kept.append(connected()); "
        "[kept[0].allreduce(numpy.ones(1, numpy.float32), async_op=True) for _ in range(1000)]",
    ],
    ids=["connect", "allreduce", "wait", "room"],
)
def test_ctrl_c_works_while_waiting(place, blocked):
    code = f"""
        import signal, sys, threading
        import numpy, racksum

        # The process that started the tests may ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def connected():
            def other():
                kept.append(racksum.connect(sys.argv[1], job=sys.argv[2], rank=1, world=2))

            thread = threading.Thread(target=other)
            thread.start()
            session = racksum.connect(sys.argv[1], job=sys.argv[2], rank=0, world=2)
            thread.join()
            print("connected", flush=True)
            return session

        kept = []
        print("start", flush=True)
        try:
            {blocked}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), place.address, place.new_job()],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "start\n"
    if "connected()" in blocked:
        assert process.stdout.readline() == "connected\n"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert output == "interrupted\n"
    assert process.returncode == 0


INTERRUPTED = """
    import signal, sys, threading
    import numpy, racksum

    class Interrupted({base}):
        pass

    def interrupt(*_):
        raise Interrupted

    def reduced(session, value):
        x = numpy.full(1, value, numpy.float32)
        return session.allreduce(x, async_op=True)

    def connected(rank):
        return racksum.connect(sys.argv[1], job=sys.argv[2], rank=rank, world=2)

    left_out = threading.Event()

    def other():
        with connected(1) as session:
            left_out.wait()
            handles = [reduced(session, i) for i in range(session.max_ops)]
            try:
                reduced(session, 1000).wait()
            except racksum.Mismatch:
                print("mismatch", flush=True)
            print(reduced(session, 2000).wait().item(), flush=True)
            assert [handle.wait().item() for handle in handles] == expected

    thread = threading.Thread(target=other)
    thread.start()
    session = connected(0)
    expected = [2.0 * i for i in range(session.max_ops)]
    handles = [reduced(session, i) for i in range(session.max_ops)]
    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        # There is no room for this op, so the call waits until the signal.
        reduced(session, 1000)
    except Interrupted:
        left_out.set()
    assert reduced(session, 2000).wait().item() == 4000
    assert [handle.wait().item() for handle in handles] == expected
    thread.join()
    session.close()
"""


@pytest.mark.parametrize("base", ["BaseException", "Exception"])
def test_a_call_that_a_handler_interrupts_is_told_and_the_next_pairs(place, base):
    code = textwrap.dedent(INTERRUPTED.format(base=base))
    ran = subprocess.run(
        [sys.executable, "-c", code, place.address, place.new_job()],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (ran.returncode, ran.stdout) == (0, "mismatch\n4000.0\n"), ran.stderr


CALLS = {
    "allreduce": lambda session: session.allreduce(np.ones(4, np.float32)),
    "allreduce_blocks": lambda session: session.allreduce_blocks(
        np.zeros(1, np.int64), np.ones(256, np.float32), 256
    ),
    "refuse": lambda session: session.refuse(),
    "refused": lambda session: session.allreduce(np.ones(4, np.float32), wire=5),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_interrupted_twice_is_told_and_the_next_pairs(place, call):
    def work(session):
        if session.rank == 0:
            # Ctrl-C ends the first two waits for ops that another thread has yet to start.
            interrupts = [KeyboardInterrupt, KeyboardInterrupt]

            def wait_for_earlier():
                if interrupts:
                    raise interrupts.pop()

            session._before_op = wait_for_earlier
            with pytest.raises(KeyboardInterrupt):
                CALLS[call](session)
            # Each interrupt ends one call, so the second one ends this call.
            with pytest.raises(KeyboardInterrupt):
                session.allreduce(np.ones(4, np.float32))
        else:
            for _ in range(2):
                with pytest.raises(racksum.Mismatch):
                    session.allreduce(np.ones(4, np.float32))
        return session.allreduce(np.full(4, 100.0 + session.rank, np.float32)).tolist()

    assert place.run(2, work) == [[201.0] * 4] * 2


def test_a_fork_after_connecting_is_told_to_connect_itself(place):
    held = [place.connect()]
    held.append(held[0].allreduce(np.ones(1, np.float32), async_op=True))
    child = os.fork()
    if child == 0:
        # The child must never run the rest of the tests.
        code = 1
        try:
            code = in_child(*held)
            held.clear()
            gc.collect()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    session, handle = held
    assert handle.wait().item() == 1
    assert session.allreduce(np.ones(1, np.float32)).item() == 1
    session.close()


def in_child(session: racksum.Session, handle: racksum.Handle) -> int:
    """Returns 0 if the parent's session refuses to work in the child."""
    if not session.closed:
        return 2
    calls = [lambda: session.allreduce(np.ones(1, np.float32)), handle.wait, session.stats]
    for nth, call in enumerate(calls):
        try:
            call()
        except racksum.SessionClosed as error:
            if "forked" not in str(error):
                return 3 + nth
        else:
            return 13 + nth
    session.close()
    return 0


def test_a_child_that_was_forked_may_connect(place):
    with place.connect():
        ran = python(
            """
            import os, sys
            import numpy, racksum

            session = racksum.connect(sys.argv[1], job=sys.argv[2], rank=0, world=1)
            child = os.fork()
            if child == 0:
                own = racksum.connect(sys.argv[1], job=sys.argv[2] + "-child", rank=0, world=1)
                assert own.allreduce(numpy.ones(2)).sum() == 2
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert session.allreduce(numpy.ones(2)).sum() == 2
            """,
            place.address,
            place.new_job(),
        )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("end", ["held.clear(); os._exit(0)", "sys.exit()"], ids=["drop", "exit"])
def test_a_child_that_was_forked_takes_no_memory_back(place, end):
    ran = python(
        f"""
        import os, sys
        import numpy, racksum

        session = racksum.connect(sys.argv[1], job=sys.argv[2], rank=0, world=1)
        held = [session.empty(1000, numpy.float32)]
        held[0][:] = 1
        if os.fork() == 0:
            {end}
        assert os.wait()[1] == 0
        assert session.allreduce(held[0]).sum() == 1000
        session.allreduce(session.empty(10))
        shared = session.stats()["sidecar_shared_bytes"]
        assert shared == (4040 if sys.argv[1].startswith("unix:") else 0), shared
        """,
        place.address,
        place.new_job(),
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_script_that_never_closes_ends(place):
    ran = python(
        """
        import sys
        import numpy, racksum

        session = racksum.connect(sys.argv[1], job=sys.argv[2], rank=0, world=1)
        handle = session.allreduce(numpy.ones(100000), async_op=True)
        """,
        place.address,
        place.new_job(),
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_killed_rank_is_named_to_the_others(place):
    job = place.new_job()
    code = """
        import sys, time
        import numpy, racksum

        session = racksum.connect(sys.argv[1], job=sys.argv[2], rank=1, world=2)
        session.allreduce(numpy.ones(10, numpy.float32))
        time.sleep(60)
    """
    doomed = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), place.address, job])
    with place.connect(job=job, world=2) as session:
        session.allreduce(np.ones(10, np.float32))
        assert not session.closed
        doomed.kill()
        doomed.wait()
        with pytest.raises(racksum.PeerLost, match="lost rank 1") as lost:
            session.allreduce(np.ones(10, np.float32))
        assert lost.value.ranks == (1,)
        assert isinstance(lost.value, ConnectionError)
        assert session.closed
        with pytest.raises(racksum.PeerLost):
            session.allreduce(np.ones(10, np.float32))


def test_a_rank_that_is_killed_is_missed_although_its_child_lives(place):
    job = place.new_job()
    code = """
        import os, sys, time
        import numpy, racksum

        session = racksum.connect(sys.argv[1], job=sys.argv[2], rank=1, world=2)
        session.allreduce(numpy.ones(10, numpy.float32))
        child = os.fork()
        if child:
            print(child, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), place.address, job]
    doomed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with place.connect(job=job, world=2) as session:
        session.allreduce(np.ones(10, np.float32))
        child = int(doomed.stdout.readline())
        doomed.kill()
        try:
            # If the exit went unnoticed, the error would be about a silent rank or a late op.
            with pytest.raises(racksum.PeerLost, match="lost rank 1: its process exited"):
                session.allreduce(np.ones(10, np.float32))
        finally:
            os.kill(child, signal.SIGKILL)
            doomed.communicate()


def test_what_is_logged_reaches_logging(cluster, caplog):
    with caplog.at_level("INFO", logger="racksum"), cluster.connect():
        pass
    assert any("rank 0 of 1 joined job" in record.getMessage() for record in caplog.records)
    caplog.clear()
    with caplog.at_level("DEBUG"), cluster.connect():
        pass
    of_worker = [record for record in caplog.records if record.name.startswith("racksum.worker.")]
    messages = [record.getMessage() for record in of_worker]
    assert any(line.startswith("racksum: client closes") for line in messages), caplog.text


def test_a_rank_that_does_not_call_is_named_when_time_is_up(place):
    ended = threading.Event()

    def work(session):
        if session.rank == 1:
            ended.wait(60)
            return ()
        with pytest.raises(racksum.OpTimeout, match="waiting for rank 1") as late:
            session.allreduce(np.ones(10, np.float32))
        ended.set()
        assert isinstance(late.value, TimeoutError)
        return late.value.missing

    assert place.run(2, work, timeout=1.0) == [(1,), ()]


def test_a_lost_aggregator_ends_the_session(aggregator):
    with racksum.connect(aggregator.address, job="j", rank=0, world=1, timeout=20.0) as session:
        session.allreduce(np.ones(10, np.float32))
        aggregator.kill()
        with pytest.raises((racksum.NoAggregator, racksum.SessionClosed)):
            session.allreduce(np.ones(10, np.float32))


def test_a_job_goes_on_at_its_second_aggregator(aggregator, shared_aggregator):
    both = f"{aggregator.address},{shared_aggregator.address}"
    with racksum.connect(both, job="second", rank=0, world=1, timeout=20.0) as session:
        session.allreduce(np.ones(10, np.float32))
        aggregator.kill()
        assert session.allreduce(np.ones(10, np.float32)).sum() == 10
