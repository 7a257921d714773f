"""Many files through a function on all cores, in order, with a bounded number of results waiting."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

TASK = 32  # items handed to a thread at a time: with fewer, threads wait for each other more
AHEAD = 4  # tasks a thread may be ahead of the one who takes the results: covers the pauses of a disk


def in_parallel(function: Callable[[list[Item]], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`function` of the first few items, of the next, and so on. Threads suffice: decoders work outside of Python."""
    # those that a scheduler has left us, where the system says so: of a large machine that may be a few
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting: deque[Future[Result]] = deque()
    remaining = iter(items)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="onecrop-decoder")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # decoders warn of metadata; what matters is raised and becomes a reason
            while True:
                while len(waiting) < AHEAD * workers and (task := list(islice(remaining, TASK))):
                    waiting.append(pool.submit(function, task))
                if not waiting:
                    return
                yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
