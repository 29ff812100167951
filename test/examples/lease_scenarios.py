"""POST /mails: work that leaves the database, under a lease of 10 seconds."""

import http.client
import json

from harness import Background, check, equal, unique, wait_for


def mail(to, **more):
    return {"to": to, **more}


def lease_until(lang, key):
    return lang.db.one("SELECT lease_until FROM idem_get(%s)", key)


def mail_and_replay(lang):
    to, key = f"a{unique()}", f"k-{unique()}"
    first = lang.server.post("/mails", mail(to), key)
    second = lang.server.post("/mails", mail(to), key)
    equal((first.status, json.loads(first.body)), (201, {"sent": to}), "first")
    equal((second.status, second.body), (201, first.body), "second")
    equal(second.headers.get("idempotent-replayed"), "true", "replayed")
    equal(lang.server.post("/mails", mail(to + "x"), key).status, 422, "another body")
    equal(lang.db.count("outside", "what = %s", f"mail:{to}"), 1, "mails")
    equal(lang.db.count("sent", "recipient = %s", to), 1, "rows")


def mail_is_renewed_and_busy(lang):
    to, key = f"b{unique()}", f"k-{unique()}"
    with lang.db.gate() as gate:
        body = mail(to, gate=gate.number)
        first = Background(lang.server.post, "/mails", body, key)
        gate.wait_reached()
        began = lease_until(lang, key)
        busy = lang.server.post("/mails", body, key)
        equal(busy.status, 409, "status of a duplicate")
        check(1 <= int(busy.headers["retry-after"]) <= 10, "Retry-After is the rest of the lease:", busy.headers)
        wait_for("the lease is renewed", lambda: lease_until(lang, key) > began)
        gate.open()
    equal(first.result().status, 201, "status")
    equal(lang.db.count("sent", "recipient = %s", to), 1, "rows")


def mail_lost_connection(lang):
    """The backends of the module are terminated during the call outside: recording connects again."""
    to, key = f"c{unique()}", f"k-{unique()}"
    with lang.db.gate() as gate:
        first = Background(lang.server.post, "/mails", mail(to, gate=gate.number), key)
        pid = gate.wait_reached()
        lang.db.rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop' AND pid <> %s", pid)
        gate.open()
    equal(first.result().status, 201, "status")
    equal(lang.db.count("sent", "recipient = %s", to), 1, "rows")


def lease_answer_lost(lang):
    """The lease is committed, its answer has not arrived: asking again gives the same lease, not busy."""
    to, key = f"m{unique()}", f"k-{unique()}"
    with lang.db.commits_wait():
        reply = Background(lang.server.post, "/mails", mail(to), key)
        lang.db.lose_commit_answer()
    equal(reply.result().status, 201, "status")
    equal(lang.db.one("SELECT attempt FROM idem_get(%s)", key), 1, "attempt")
    equal(lang.db.count("outside", "what = %s", f"mail:{to}"), 1, "mails")
    equal(lang.db.count("sent", "recipient = %s", to), 1, "rows")


def mail_commit_answer_lost(lang):
    """The COMMIT of the record has happened, its answer has not arrived: the fence keeps it from being repeated."""
    to, key = f"l{unique()}", f"k-{unique()}"
    with lang.db.gate() as gate:
        reply = Background(lang.server.post, "/mails", mail(to, gate=gate.number), key)
        gate.wait_reached()
        with lang.db.commits_wait():
            gate.open()
            lang.db.lose_commit_answer()
            # it asks again: not in vain if that does not write, so there is nothing more to wait for
            wait_for("the answer", lambda: not reply.thread.is_alive())
    reply = reply.result()
    equal((reply.status, json.loads(reply.body)), (201, {"sent": to}), "answer")
    equal(lang.db.count("sent", "recipient = %s", to), 1, "rows")


def stale_holder(lang):
    """Another worker takes over while the first one is outside: the first one writes nothing."""
    to, key = f"d{unique()}", f"k-{unique()}"
    with lang.db.gate() as gate:
        body = mail(to, gate=gate.number)
        first = Background(lang.server.post, "/mails", body, key)
        gate.wait_reached()
        # The clock of this session only: for it, the lease has expired.
        lang.db.rows("SET idem.clock_offset = '1 min'")
        claimed, token = lang.db.rows("SELECT claimed, token FROM idem_lease(%s, '1 h')", key)[0]
        lang.db.rows("RESET idem.clock_offset")
        equal(claimed, True, "takeover")
        gate.open()
        equal(first.result().status, 409, "status of the stale holder")
        equal(lang.db.count("sent", "recipient = %s", to), 0, "rows of the stale holder")
        lang.db.rows("SELECT idem_release(%s, %s)", key, token)
        equal(lang.server.post("/mails", body, key).status, 201, "status after the release")
    equal(lang.db.count("sent", "recipient = %s", to), 1, "rows")


def killed_with_lease(lang):
    """kill -9 of program and worker during the call outside: the next ones take over after the lease.

    Outside twice, recorded once. Both in one scenario, because leases take their time.
    """
    to, key = f"e{unique()}", f"k-{unique()}"
    with lang.db.gate() as gate:
        body = mail(to, gate=gate.number)
        lost = Background(lang.server.post, "/mails", body, key)
        gate.wait_reached()
        job = lang.db.one("SELECT job_id FROM idem_enqueue('mail', %s::jsonb)", json.dumps(mail(f"{to}w", gate=gate.number)))
        worker = lang.worker()
        wait_for("the worker waits at the gate, too", lambda: len(gate.waiting()) == 2)
        worker.kill()
        lang.server.kill()
        try:
            lost.result()
            check(False, "the request was answered")
        except (OSError, http.client.HTTPException):
            pass
        gate.open()
        lang.server.start()
        equal(lang.server.post("/mails", body, key).status, 409, "status while the lease lasts")
        lang.worker()
        reply = lang.server.persist("/mails", body, key)
    equal(reply.status, 201, "status")
    equal(lang.db.count("outside", "what = %s", f"mail:{to}"), 2, "mails")
    equal(lang.db.count("sent", "recipient = %s", to), 1, "rows")
    wait_for("the job is done", lambda: lang.db.one("SELECT count(*) FROM idem_job(%s) WHERE state <> 'done'", job) == 0)
    equal(lang.db.count("outside", "what = %s", f"mail:{to}w"), 2, "mails of the worker")


SCENARIOS = [
    mail_and_replay,
    mail_is_renewed_and_busy,
    mail_lost_connection,
    lease_answer_lost,
    mail_commit_answer_lost,
    stale_holder,
    killed_with_lease,
]
