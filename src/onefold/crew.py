"""Owns threads that work off jobs where a ThreadPoolExecutor would not: it refuses jobs once the main thread has ended,
and a save may go on then.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


class Crew:
    """So many threads, until `leave`.

    Raises:
        RuntimeError: the system has not so many.
    """

    def __init__(self, number: int, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        try:
            for _ in range(number):
                thread = Thread(target=self._serve, name=name)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the system has no more
            self.leave()
            raise

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Have some thread do the job."""
        future: Future[Result] = Future()
        self._jobs.put(partial(_do, job, future))
        return future

    def leave(self) -> None:
        """Come back when every job is done and the threads have ended."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _do(job: Callable[[], Result], future: "Future[Result]") -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
