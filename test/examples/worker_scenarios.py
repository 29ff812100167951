"""`start work`: the queue index (in a transaction) and the queue mail (with a lease)."""

import json
import random
import threading

from harness import Background, check, equal, unique, wait_for


def enqueue(lang, queue, payload, **more):
    return lang.db.one(
        "SELECT job_id FROM idem_enqueue(%s, %s::jsonb, max_attempts => %s::int)",
        queue, json.dumps(payload), more.get("max_attempts"),
    )


def state(lang, job):
    """(state, attempt), or (None, None) if the job is done and gone."""
    rows = lang.db.rows("SELECT state, attempt FROM idem_job(%s)", job)
    return rows[0] if rows else (None, None)


def no_jobs_left(lang):
    return lang.db.count("idem.job_status", "state NOT IN ('done', 'dead', 'cancelled')") == 0


def touches(lang):
    """500 updates with enqueues, a third rolled back, two workers, one of them killed: nothing stale is left."""
    orders = [unique() for _ in range(10)]
    for order in orders:
        lang.db.rows("INSERT INTO orders VALUES (%s)", order)
    todo = [(order, n % 3 == 0) for order in orders for n in range(50)]
    random.Random(14).shuffle(todo)
    lock = threading.Lock()

    def client():
        while True:
            with lock:
                if not todo:
                    return
                order, rollback = todo.pop()
            reply = lang.server.post(f"/orders/{order}/touch", {"rollback": rollback})
            equal(reply.status, 409 if rollback else 200, "status of a touch")

    survivor, victim = lang.worker(), lang.worker()
    clients = [Background(client) for _ in range(20)]
    # in the middle: some runs are done, some touches are not
    wait_for("a run of the index", lambda: lang.db.count("indexed", "order_id = ANY(%s)", orders) >= 3)
    victim.kill()
    for one in clients:
        one.result()
    wait_for("no job is left", lambda: no_jobs_left(lang))
    rows = lang.db.rows(
        "SELECT o.id, o.version, i.version FROM orders o LEFT JOIN indexed i ON i.order_id = o.id WHERE o.id = ANY(%s)", orders
    )
    for order, version, indexed in rows:
        equal(version, 33, f"version of order {order}")
        equal(indexed, version, f"indexed version of order {order}")
    survivor.kill()


def killed_in_transaction(lang):
    """kill -9 of the worker in the middle of a transaction: the job runs again, without a wait."""
    order = unique()
    lang.db.rows("INSERT INTO orders VALUES (%s, 7)", order)
    conn = lang.db._connect()
    conn.autocommit = False
    with conn.cursor() as cur:  # the worker waits for this lock
        cur.execute("SELECT FROM orders WHERE id = %s FOR UPDATE", (order,))
    worker = lang.worker()
    job = enqueue(lang, "index", {"order": order})
    wait_for(
        "the worker has the job",
        lambda: lang.db.count("pg_stat_activity", "usename = 'shop' AND wait_event_type = 'Lock'"),
    )
    worker.kill()
    conn.close()
    wait_for("its transaction is gone", lambda: not lang.db.count("pg_stat_activity", "usename = 'shop' AND state <> 'idle'"))
    equal(state(lang, job), ("waiting", 0), "the job")
    worker = lang.worker()
    wait_for("the job is done", lambda: no_jobs_left(lang))
    equal(lang.db.one("SELECT version FROM indexed WHERE order_id = %s", order), 7, "indexed version")
    worker.kill()


def failing_job_in_transaction(lang):
    """A job that fails in the database is failed, not fetched again and again, and does not stop the others."""
    worker = lang.worker()
    bad = enqueue(lang, "index", {"order": "not a number"}, max_attempts=2)
    wait_for("the job is dead", lambda: state(lang, bad)[0] == "dead")
    equal(state(lang, bad), ("dead", 2), "the job")
    order = unique()
    lang.db.rows("INSERT INTO orders VALUES (%s, 3)", order)
    enqueue(lang, "index", {"order": order})
    wait_for("the next job is done", lambda: lang.db.one("SELECT version FROM indexed WHERE order_id = %s", order) == 3)
    worker.kill()


def failing_mail(lang):
    worker = lang.worker()
    to = f"f{unique()}"
    job = enqueue(lang, "mail", {"to": to, "fail": 2})
    wait_for("the job is done", lambda: state(lang, job)[0] in (None, "done"))
    equal(lang.db.count("outside", "what = %s", f"mail:{to}"), 1, "mails")
    dead = enqueue(lang, "mail", {"to": to, "fail": 9}, max_attempts=2)
    wait_for("the job is dead", lambda: state(lang, dead)[0] == "dead")
    worker.kill()


def heartbeat_and_other_queue(lang):
    """A slow mail keeps its lease, and the other queue goes on meanwhile."""
    worker = lang.worker()
    to, order = f"g{unique()}", unique()
    lang.db.rows("INSERT INTO orders VALUES (%s, 5)", order)
    with lang.db.gate() as gate:
        job = enqueue(lang, "mail", {"to": to, "gate": gate.number})
        gate.wait_reached()
        until = "SELECT lease_until FROM idem_job(%s)"
        began = lang.db.one(until, job)
        enqueue(lang, "index", {"order": order})
        wait_for("the other queue", lambda: lang.db.one("SELECT version FROM indexed WHERE order_id = %s", order) == 5)
        wait_for("the lease is extended", lambda: lang.db.one(until, job) > began)
        gate.open()
    wait_for("the job is done", lambda: state(lang, job)[0] in (None, "done"))
    worker.kill()


def stale_worker(lang):
    """Another worker has fetched the job meanwhile: the first one does not end it."""
    worker = lang.worker()
    to = f"h{unique()}"
    with lang.db.gate() as gate:
        job = enqueue(lang, "mail", {"to": to, "gate": gate.number})
        gate.wait_reached()
        lang.db.rows("SET idem.clock_offset = '1 min'")
        rows = lang.db.rows("SELECT job_id, token FROM idem_fetch('mail', lease => '1 h')")
        lang.db.rows("RESET idem.clock_offset")
        equal([r[0] for r in rows], [job], "the job that is taken over")
        gate.open()
        # The worker goes on with other jobs, so it has tried to complete this one.
        other = enqueue(lang, "mail", {"to": to + "x"})
        wait_for("the next job is done", lambda: state(lang, other)[0] in (None, "done"))
    equal(state(lang, job), ("running", 2), "the job of the other worker")
    lang.db.rows("SELECT idem_complete(%s, %s)", job, rows[0][1])
    worker.kill()


def sleeping(lang):
    """Sessions of the program that wait in the server, without a transaction."""
    return lang.db.count(
        "pg_stat_activity",
        "usename = 'shop' AND state = 'active' AND wait_event_type = 'Extension' AND xact_start IS NULL",
    )


def woken_by_commit(lang):
    """A worker that has nothing to do waits in the server. A commit wakes it: no look of its own finds the job."""
    with lang.db.setting("idem.look_after", "1 h"):
        worker = lang.worker()
        for _ in range(3):
            wait_for("both loops of the worker wait", lambda: sleeping(lang) == 2)
            order = unique()
            lang.db.rows("INSERT INTO orders VALUES (%s, 4)", order)
            enqueue(lang, "index", {"order": order})
            wait_for("the job is done", lambda: lang.db.one("SELECT version FROM indexed WHERE order_id = %s", order) == 4)
            mail = enqueue(lang, "mail", {"to": f"k{order}"})
            wait_for("the mail is sent", lambda: state(lang, mail)[0] in (None, "done"))
        wait_for("both loops of the worker wait", lambda: sleeping(lang) == 2)
        worker.terminate()
        equal(worker.wait(), 0, "exit status of a worker that waits")
        wait_for("no session waits any more", lambda: sleeping(lang) == 0)


def schedule(lang):
    """The worker declares a schedule when it starts. Its job finds work for which nothing was enqueued."""
    worker = lang.worker()
    wait_for("the schedule is declared", lambda: lang.db.count("idem.schedules", "name = 'heal' AND queue = 'heal'") == 1)
    first = lang.db.one("SELECT next_tick FROM idem.schedules WHERE name = 'heal'")
    worker.kill()
    worker = lang.worker()
    wait_for("the worker waits", lambda: sleeping(lang) == 2)
    equal(lang.db.one("SELECT next_tick FROM idem.schedules WHERE name = 'heal'"), first, "the next tick after a restart")
    order = unique()
    lang.db.rows("INSERT INTO orders VALUES (%s, 4)", order)  # and no job
    lang.db.rows("SELECT idem_schedule('heal', 'heal', every => '1 s')")
    wait_for("the order is indexed", lambda: lang.db.one("SELECT version FROM indexed WHERE order_id = %s", order) == 4)
    lang.db.rows("SELECT idem_unschedule('heal')")
    worker.terminate()
    equal(worker.wait(), 0, "exit status of the worker")
    lang.db.rows("SELECT idem_cancel(job_id) FROM idem.jobs WHERE queue = 'heal'")


def graceful_stop(lang):
    """SIGTERM: what runs is finished, the rest is given back, the exit status is 0."""
    to = f"i{unique()}"
    with lang.db.gate() as gate:
        # before the worker starts, so that it gets them in one batch
        first = enqueue(lang, "mail", {"to": to, "gate": gate.number})
        rest = [enqueue(lang, "mail", {"to": to}) for _ in range(3)]
        worker = lang.worker()
        gate.wait_reached()
        for job in rest:
            equal(state(lang, job)[0], "running", "state of a job of the batch")
        worker.terminate()
        gate.open()
        equal(worker.wait(), 0, "exit status")
    check(state(lang, first)[0] in (None, "done"), "the job that ran is not done:", state(lang, first))
    for job in rest:
        equal(state(lang, job), ("waiting", 0), "a job that was given back")
    equal(lang.db.count("outside", "what = %s", f"mail:{to}"), 1, "mails")
    worker = lang.worker()
    wait_for("the others are done", lambda: no_jobs_left(lang))
    equal(lang.db.count("outside", "what = %s", f"mail:{to}"), 4, "mails in the end")
    worker.terminate()
    equal(worker.wait(), 0, "exit status of an idle worker")


def worker_survives_restart(lang):
    worker = lang.worker()
    lang.db.restart_immediately()
    order = unique()
    lang.db.rows("INSERT INTO orders VALUES (%s, 9)", order)
    enqueue(lang, "index", {"order": order})
    enqueue(lang, "mail", {"to": f"j{order}"})
    wait_for("both jobs are done", lambda: no_jobs_left(lang))
    equal(lang.db.one("SELECT version FROM indexed WHERE order_id = %s", order), 9, "indexed version")
    equal(worker.process.poll(), None, "the worker runs")
    worker.kill()


SCENARIOS = [
    touches,
    killed_in_transaction,
    failing_job_in_transaction,
    failing_mail,
    heartbeat_and_other_queue,
    stale_worker,
    woken_by_commit,
    schedule,
    graceful_stop,
    worker_survives_restart,
]
