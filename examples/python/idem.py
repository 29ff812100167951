"""Run work once per idempotency key, with the PostgreSQL extension idem and psycopg 3.

once():   the work is in the database. Key, work and result commit in one transaction.
leased(): the work leaves the database (a mail, a card). A lease keeps others out, a token keeps a late worker out.

The pool is a psycopg_pool.ConnectionPool. Behind pgbouncer in transaction mode give it
kwargs={"prepare_threshold": None}: this module needs no session state and no prepared statements.
"""

import json
import os
import random
import socket
import threading
import time
import uuid
from collections import namedtuple
from contextlib import contextmanager

import psycopg
from psycopg.rows import namedtuple_row

Answer = namedtuple("Answer", "result replayed")


class Busy(Exception):
    """Another request with this key runs now. Ask again after retry_after seconds."""

    def __init__(self, retry_after=1):
        super().__init__("another request with this key is being processed")
        self.retry_after = max(1, int(retry_after or 1))


class Mismatch(Exception):
    """The key was used with another request (ID001)."""


class Stale(Exception):
    """Another worker has taken over (ID003). Nothing of this attempt was stored."""


class Undecided(Exception):
    """The key is parked or has no attempts left: an operator has to decide."""


class Refusal(Exception):
    """Raise it in the work: its changes are rolled back, and the result is stored like any other."""

    def __init__(self, result):
        super().__init__("refused")
        self.result = result


class NotDone(Exception):
    """Raise it in the call of leased() if nothing has happened outside: the lease is released at once."""


# Only errors of idem's own functions get a meaning. The same SQLSTATE from the work stays what it is.
_ERRORS = {"ID001": Mismatch, "ID003": Stale}


def ask(conn, sql, *args):
    """Call a function of idem and return its row."""
    try:
        with conn.cursor(row_factory=namedtuple_row) as cur:
            return cur.execute(sql, args).fetchone()
    except psycopg.Error as error:
        if error.sqlstate in _ERRORS:
            raise _ERRORS[error.sqlstate](str(error)) from error
        raise


def commit(conn):
    """COMMIT of a transaction that has failed answers ROLLBACK, and that is no error: look at the tag."""
    if conn.execute("COMMIT").statusmessage != "COMMIT":
        raise psycopg.errors.InFailedSqlTransaction("the transaction was rolled back at its COMMIT")


def again(pool, work, tries=8):
    """work(conn), once more if the connection was lost or the server asks for it (40001, 40P01).

    A COMMIT whose answer was lost may have happened. The key knows: the work asks it first, each time.
    """
    for n in range(1, tries + 1):
        conn = None
        try:
            with pool.connection() as conn:
                return work(conn)
        except psycopg.OperationalError as error:
            # No connection in time: the pool has tried to connect all the while, so do not try again.
            lost = conn is not None and (conn.broken or conn.closed)
            if n == tries or not (lost or error.sqlstate in ("40001", "40P01")):
                raise
        time.sleep(random.uniform(0.5, 1) * min(2, 0.05 * 2**n))
        if lost:
            pool.check()  # the others may be lost, too


def autocommit(pool, sql, *args):
    def work(conn):
        conn.autocommit = True
        try:
            return ask(conn, sql, *args)
        finally:
            if not conn.broken:
                conn.autocommit = False

    return again(pool, work)


def print_holders(pool, key, scope=None):
    """For a key that is busy: who holds it, if this role may know. One line for each holder."""
    row = autocommit(
        pool,
        "SELECT string_agg(concat_ws(', ', 'key held by ' || kind, 'process ' || pid, 'worker ' || worker,"
        " 'since ' || since) || ': ' || detail, E'\\n') AS lines FROM idem_holder(%s, %s)",
        key, scope,
    )
    if row.lines:
        print(row.lines, flush=True)


def wait_for_job(pool, job_id, seconds=30):
    """Wait until the job has ended. Returns its state; if the time is over, prints why the job has not ended."""
    state = autocommit(pool, "CALL idem_wait_job(%s::bigint, %s)", job_id, f"{seconds} s").state
    if state not in ("done", "dead", "cancelled", "gone"):  # gone: done, and its queue does not keep it
        row = autocommit(
            pool,
            "SELECT string_agg(concat_ws(', ', format('job %%s %%s', %s, reason), 'process ' || pid,"
            " 'since ' || since) || ': ' || detail, E'\\n') AS lines FROM idem_why(%s::bigint)",
            job_id, job_id,
        )
        print(row.lines, flush=True)
    return state


def once(pool, key, request, fn, *, scope=None, ttl=None, wait="0"):
    """fn(conn) in the transaction that claims the key; returns Answer(result, replayed).

    request and the result are anything that json.dumps takes. fn must neither commit nor roll back.
    """

    def work(conn):
        try:
            # One round trip: psycopg puts BEGIN before the first statement.
            with conn.pipeline():
                cur = conn.cursor(row_factory=namedtuple_row)
                cur.execute(
                    "SELECT claimed, status, result FROM idem_claim(%s, request => %s::jsonb,"
                    " ttl => %s::interval, wait => %s::interval, scope => %s)",
                    (key, json.dumps(request), ttl, wait, scope),
                )
                conn.execute("SAVEPOINT idem_work")
            claim = cur.fetchone()
        except psycopg.Error as error:
            raise _ERRORS.get(error.sqlstate, lambda _: error)(str(error)) from error
        if not claim.claimed:
            conn.rollback()
            return _not_claimed(claim)
        try:
            result = fn(conn)
        except Refusal as refusal:
            conn.execute("ROLLBACK TO SAVEPOINT idem_work")  # not the claim: it has to be stored
            result = refusal.result
        ask(conn, "SELECT idem_finish(%s, %s::jsonb, scope => %s)", key, json.dumps(result), scope)
        commit(conn)
        return Answer(result, False)

    return again(pool, work)


def _not_claimed(row):
    if row.status == "finished":
        return Answer(row.result, True)
    if row.status == "busy":
        raise Busy(getattr(row, "seconds", None))
    raise Undecided(row.status)


class Lease:
    """What the call of leased() gets. lost is an Event: set when another worker has taken over."""

    def __init__(self, row):
        self.token, self.attempt, self.checkpoint = row.token, row.attempt, row.checkpoint
        self.lost = threading.Event()


def leased(pool, key, request, call, record, *, lease=30, scope=None, ttl=None, max_attempts=None):
    """call(lease) outside of any transaction, then record(conn, what call returned) in the one that finishes the key.

    The lease (in seconds) is renewed while call runs. The outside call may happen twice: pass the key on.
    """
    # Unique: if the answer is lost, asking again with the same name gives the same lease.
    worker = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4()}"
    row = autocommit(
        pool,
        "SELECT *, ceil(extract(epoch FROM lease_until - clock_timestamp())) AS seconds"
        " FROM idem_lease(%s, %s::interval, request => %s::jsonb, ttl => %s::interval, worker => %s,"
        " max_attempts => %s::int, scope => %s)",
        key, f"{lease} s", json.dumps(request), ttl, worker, max_attempts, scope,
    )
    if not row.claimed:
        return _not_claimed(row)
    held = Lease(row)
    try:
        # The renewal ends before the fence: a renewal from another session would wait for the fence.
        renew = "SELECT idem_renew(%s, %s::bigint, %s::interval, %s)"
        with heartbeat(lease / 3, lambda: autocommit(pool, renew, key, held.token, f"{lease} s", scope), held.lost):
            outcome = call(held)
        if held.lost.is_set():
            raise Stale("another worker has taken over")
        return again(pool, lambda conn: _record(conn, key, held.token, scope, lambda: record(conn, outcome)))
    except NotDone:
        autocommit(pool, "SELECT idem_release(%s, %s::bigint, %s)", key, held.token, scope)
        raise
    except Refusal as refusal:
        return again(pool, lambda conn: _record(conn, key, held.token, scope, lambda: refusal.result))


def _record(conn, key, token, scope, record):
    try:
        ask(conn, "SELECT idem_fence(%s, %s::bigint, %s)", key, token, scope)
    except psycopg.Error as error:
        if error.sqlstate != "ID004":
            raise
        conn.rollback()  # finished: our COMMIT happened, its answer was lost
        return Answer(ask(conn, "SELECT result FROM idem_get(%s, %s)", key, scope).result, False)
    result = record()
    ask(conn, "SELECT idem_finish(%s, %s::jsonb, %s::bigint, %s)", key, json.dumps(result), token, scope)
    commit(conn)
    return Answer(result, False)


@contextmanager
def heartbeat(seconds, beat, lost):
    """Call beat() every so many seconds in the background; sets lost if it raises Stale."""
    done = threading.Event()

    def run():
        while not done.wait(seconds):
            try:
                beat()
            except Stale:
                lost.set()
                return
            except psycopg.Error:
                pass  # says nothing about the lease: again

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
