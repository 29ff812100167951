"""A worker for the queues of idem, on top of idem.py.

    worker = Worker(pool)
    worker.transaction("index", handler)       # handler(conn, job): job and work commit together
    worker.leased("mail", handler)             # handler(job, lost): the work leaves the database; lost: an Event
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.run()                               # until stop(): ends what runs, gives back the rest

A handler that raises an error fails the job: it is retried with the backoff of its queue. When there is nothing to do,
the worker waits in the server, and the commit of the next job wakes it.
"""

import contextlib
import os
import random
import socket
import threading

import psycopg
from psycopg.rows import namedtuple_row

from idem import Stale, again, ask, autocommit, commit, heartbeat


@contextlib.contextmanager
def _autocommit(conn):
    conn.autocommit = True
    try:
        yield
    finally:
        if not conn.broken:
            conn.autocommit = False


class Worker:
    def __init__(self, pool, wait=30, batch=10, lease=30):
        """The longest wait for a job, in seconds; jobs per fetch and seconds of the lease, for the queues with a lease."""
        self.pool, self.wait, self.batch, self.lease = pool, wait, batch, lease
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.in_transaction, self.with_lease = {}, {}
        self.stopping = threading.Event()
        self.waiting, self.lock = set(), threading.Lock()  # connections that wait

    def transaction(self, queue, handler):
        self.in_transaction[queue] = handler

    def leased(self, queue, handler):
        self.with_lease[queue] = handler

    def stop(self):
        self.stopping.set()

    def run(self):
        """One thread per mode, so that a slow call outside does not keep the other queues waiting."""
        rounds = ((self._one, self.in_transaction), (self._several, self.with_lease))
        threads = [threading.Thread(target=self._loop, args=(r, list(queues))) for r, queues in rounds if queues]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.1)  # returns to Python, so that signal handlers run
            if self.stopping.is_set():
                self._end_waits()

    def _loop(self, one_round, queues):
        while not self.stopping.is_set():
            try:
                if not one_round():
                    self._wait(queues)
            except Exception as error:  # the server is away, say: try again, with jitter
                print(f"worker: {error}", flush=True)
                self.stopping.wait(random.uniform(0.5, 1.5))

    def _wait(self, queues):
        """Until a commit lets a job go. In autocommit, because the session has no transaction while it waits."""
        with self.pool.connection() as conn, _autocommit(conn):
            with self.lock:
                self.waiting.add(conn)
            try:
                if not self.stopping.is_set():
                    conn.execute("CALL idem_wait_any(%s, %s)", (queues, f"{self.wait} s"))
            except psycopg.errors.QueryCanceled:
                if not self.stopping.is_set():  # statement_timeout: shorter than the wait
                    raise
            finally:
                with self.lock:
                    self.waiting.remove(conn)

    def _end_waits(self):
        """Called again and again: a cancel may come before the server has the statement."""
        with self.lock:
            for conn in self.waiting:
                with contextlib.suppress(psycopg.Error):
                    conn.cancel()

    # Fetch, work and complete in one transaction: a crash gives the job back.
    def _one(self):
        queues = random.sample(sorted(self.in_transaction), len(self.in_transaction))

        def work(conn):
            job = ask(
                conn,
                "SELECT f.* FROM unnest(%s::text[]) AS q, LATERAL idem_fetch(q, lease => '0', worker => %s) AS f LIMIT 1",
                queues, self.name,
            )
            if job is None:
                conn.rollback()
                return False
            # A plain ROLLBACK would undo the fetch, too: no attempt counted, no backoff.
            conn.execute("SAVEPOINT idem_work")
            try:
                self.in_transaction[job.queue](conn, job)
                ask(conn, "SELECT idem_complete(%s::bigint, %s::bigint)", job.job_id, job.token)
            except Exception as error:
                if conn.broken or conn.closed:
                    raise
                conn.execute("ROLLBACK TO SAVEPOINT idem_work")
                ask(conn, "SELECT idem_fail(%s::bigint, %s::bigint, %s)", job.job_id, job.token, str(error))
            commit(conn)
            return True

        return again(self.pool, work)

    # Fetch with a lease, in autocommit; no transaction is open during the work.
    def _several(self):
        jobs = self._fetch()
        held = {job.job_id: job for job in jobs}
        lost = {job.job_id: threading.Event() for job in jobs}

        def beat():
            ids = list(held)
            tokens = [held[i].token for i in ids]
            for row in self._all(
                "SELECT * FROM idem_heartbeat(%s::bigint[], %s::bigint[], %s::interval)", ids, tokens, f"{self.lease} s"
            ):
                if row.status != "renewed":
                    lost[row.job_id].set()

        with heartbeat(self.lease / 3, beat, threading.Event()):
            for job in jobs:
                if self.stopping.is_set():  # not begun: give it back, the attempt does not count
                    self._end("SELECT idem_snooze(%s::bigint, %s::bigint, '0')", job)
                elif not lost[job.job_id].is_set():
                    self._call(job, lost[job.job_id])
                del held[job.job_id]
        return len(jobs) > 0

    def _call(self, job, lost):
        try:
            self.with_lease[job.queue](job, lost)
        except Exception as error:
            self._end("SELECT idem_fail(%s::bigint, %s::bigint, %s)", job, str(error))
        else:
            self._end("SELECT idem_complete(%s::bigint, %s::bigint)", job)

    def _end(self, sql, job, *args):
        try:
            autocommit(self.pool, sql, job.job_id, job.token, *args)
        except Stale:
            pass  # another worker has the job, or a lost answer: it has ended

    def _fetch(self):
        return self._all(
            "SELECT f.* FROM unnest(%s::text[]) AS q,"
            " LATERAL idem_fetch(q, batch => %s, lease => %s::interval, worker => %s) AS f",
            list(self.with_lease), self.batch, f"{self.lease} s", self.name,
        )

    def _all(self, sql, *args):
        def work(conn):
            with _autocommit(conn), conn.cursor(row_factory=namedtuple_row) as cur:
                return cur.execute(sql, args).fetchall()

        return again(self.pool, work)
