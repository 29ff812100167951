"""POST /charges: the header, the answers, and every kind of interruption."""

import http.client
import json
import os
import signal

from harness import Background, check, equal, unique, wait_for


def charge(order, cents=100, **more):
    return {"order": order, "cents": cents, **more}


def header_missing(lang):
    reply = lang.server.post("/charges", charge(unique()))
    equal(reply.status, 400, "status")
    check(reply.headers["content-type"].startswith("application/problem+json"), "no problem+json:", reply.headers)
    json.loads(reply.body)


def header_invalid(lang):
    order = unique()
    bad = {
        "empty": b"",
        "empty string": b'""',
        "open quote": b'"abc',
        "escape": rb'"a\u0000b"',
        "latin-1": "\xe9t\xe9".encode("latin-1"),
        "utf-8": "\u20ac".encode(),
        "quoted utf-8": '"\u20ac"'.encode(),
        "over-long": b"k" * 1025,
        "quoted over-long": b'"' + b"k" * 1025 + b'"',
        "tab": b"a\tb",
        "NUL": b"a\x00b",
        "two keys": b"abc, def",
        "parameter": b'"abc";q=1',
    }
    for name, header in bad.items():
        equal(lang.server.raw_status("/charges", charge(order), header), 400, name)
    equal(lang.db.count("charges", "order_id = %s", order), 0, "rows")
    longest = str(unique()).encode().ljust(1024, b"k")
    equal(lang.server.raw_status("/charges", charge(order), longest), 201, "longest key")


def header_quoted(lang):
    order, key = unique(), f"quoted {unique()}"
    first = lang.server.post("/charges", charge(order), f'"a\\"b\\\\{key}"')
    equal(first.status, 201, "status")
    key = f"k-{unique()}"
    first = lang.server.post("/charges", charge(order), f'"{key}"')
    second = lang.server.post("/charges", charge(order), key)
    equal(second.headers.get("idempotent-replayed"), "true", "replayed")
    equal(second.body, first.body, "body")


def answer_and_replay(lang):
    order, key = unique(), f"k-{unique()}"
    first = lang.server.post("/charges", charge(order, 77), key)
    charge_id = lang.db.one("SELECT id FROM charges WHERE order_id = %s", order)
    equal(first.status, 201, "status")
    equal(list(json.loads(first.body).items()), [("order", order), ("charge_id", charge_id), ("cents", 77)], "body")
    equal(first.headers.get("location"), f"/charges/{charge_id}", "Location")
    check("idempotent-replayed" not in first.headers, "the first answer is marked as replayed")
    second = lang.server.post("/charges", charge(order, 77), key)
    equal((second.status, second.body), (first.status, first.body), "replay")
    for name in ("location", "content-type"):
        equal(second.headers.get(name), first.headers.get(name), name)
    equal(second.headers.get("idempotent-replayed"), "true", "replayed")
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def fifty_at_once(lang):
    order, key = unique(), f"k-{unique()}"
    with lang.db.gate() as gate:
        first = Background(lang.server.persist, "/charges", charge(order, gate=gate.number), key)
        gate.wait_reached()
        # While the first one runs, a duplicate is told so at once.
        busy = lang.server.post("/charges", charge(order, gate=gate.number), key)
        equal(busy.status, 409, "status while the first one runs")
        check(int(busy.headers["retry-after"]) >= 1, "Retry-After:", busy.headers)
        others = [Background(lang.server.persist, "/charges", charge(order, gate=gate.number), key) for _ in range(49)]
        gate.open()
        replies = [first.result()] + [other.result() for other in others]
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")
    equal({(r.status, r.body) for r in replies}, {(201, replies[0].body)}, "answers")
    equal(sum(r.headers.get("idempotent-replayed") == "true" for r in replies), 49, "replayed answers")


def fifty_without_gate(lang):
    order, key = unique(), f"k-{unique()}"
    replies = [Background(lang.server.persist, "/charges", charge(order), key) for _ in range(50)]
    replies = [reply.result() for reply in replies]
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")
    equal({(r.status, r.body) for r in replies}, {(201, replies[0].body)}, "answers")
    equal(sum(r.headers.get("idempotent-replayed") == "true" for r in replies), 49, "replayed answers")


def another_request(lang):
    order, key = unique(), f"k-{unique()}"
    equal(lang.server.post("/charges", charge(order), key).status, 201, "first")
    equal(lang.server.post("/charges", charge(order, 101), key).status, 422, "another body")
    equal(lang.server.request("PUT", "/charges", charge(order), key).status, 422, "another method")
    equal(lang.server.post("/charges?test=1", charge(order), key).status, 422, "another query")
    equal(lang.server.post("/mails", charge(order), key).status, 422, "another path")
    equal(lang.server.post("/charges", charge(order), key).status, 201, "the same again")
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def customers_apart(lang):
    """One key of two customers is two keys. Without a customer it is a third one."""
    order, key = unique(), f"k-{unique()}"
    for customer in ([("X-Customer", "alice")], [("X-Customer", "bob")], []):
        first = lang.server.request("POST", "/charges", charge(order), key, customer)
        equal((first.status, first.headers.get("idempotent-replayed")), (201, None), f"first answer of {customer}")
        second = lang.server.request("POST", "/charges", charge(order), key, customer)
        equal((second.body, second.headers.get("idempotent-replayed")), (first.body, "true"), f"second answer of {customer}")
    equal(lang.db.count("charges", "order_id = %s", order), 3, "rows")
    equal(
        [scope for scope, in lang.db.rows("SELECT scope FROM idem.keys WHERE key = %s ORDER BY scope", key)],
        ["", "alice", "bob"], "scopes",
    )


def body_too_large(lang):
    """It is not read to its end, and nothing is stored. The handler sees a body that is just small enough."""
    order, key = unique(), f"k-{unique()}"
    for path in ("/charges", "/mails"):
        equal(lang.server.post(path, b"x" * ((1 << 20) + 1), key).status, 413, path)
    equal(lang.db.count("idem.keys", "key = %s", key), 0, "keys")
    body = json.dumps(charge(order)).encode().ljust(90_000)
    equal(lang.server.post("/charges", body, key).status, 201, "a large body")


def refusal_is_stored(lang):
    order, key = unique(), f"k-{unique()}"
    first = lang.server.post("/charges", charge(order, 100001), key)
    second = lang.server.post("/charges", charge(order, 100001), key)
    equal((first.status, json.loads(first.body)), (402, {"error": "too much"}), "first")
    equal((second.status, second.body), (402, first.body), "second")
    equal(second.headers.get("idempotent-replayed"), "true", "replayed")
    equal(lang.db.count("charges", "order_id = %s", order), 0, "rows")


def failure_is_not_stored(lang):
    for kind in ("throw", "denied", "swallow"):
        order, key = unique(), f"k-{unique()}"
        for _ in range(2):
            reply = lang.server.post("/charges", charge(order, fail=kind), key)
            equal(reply.status, 500, kind)
        equal(lang.db.count("charges", "order_id = %s", order), 0, f"rows after {kind}")
        equal(lang.db.count("idem.keys", "key = %s", key), 0, f"keys after {kind}")
        # Nothing is stored, so the key is free for a request that works.
        equal(lang.server.post("/charges", charge(order), key).status, 201, f"after {kind}")
        equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def client_aborts(lang):
    order, key = unique(), f"k-{unique()}"
    with lang.db.gate() as gate:
        body = charge(order, gate=gate.number)
        socket = lang.server.abort("/charges", body, key)
        gate.wait_reached()
        socket.close()
        gate.open()
        reply = lang.server.persist("/charges", body, key)
    equal(reply.status, 201, "status")
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def program_killed(lang):
    order, key = unique(), f"k-{unique()}"
    with lang.db.gate() as gate:
        body = charge(order, gate=gate.number)
        lost = Background(lang.server.post, "/charges", body, key)
        pid = gate.wait_reached()
        lang.server.kill()
        try:
            lost.result()
            check(False, "the request was answered")
        except (OSError, http.client.HTTPException):
            pass
        wait_for("the transaction is gone", lambda: not lang.db.count("pg_stat_activity", "pid = %s", pid))
        equal(lang.db.count("charges", "order_id = %s", order), 0, "rows after the kill")
        gate.open()
        lang.server.start()
        reply = lang.server.persist("/charges", body, key)
    equal(reply.status, 201, "status")
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def backend_terminated(lang):
    order, key = unique(), f"k-{unique()}"
    with lang.db.gate() as gate:
        body = charge(order, gate=gate.number)
        reply = Background(lang.server.post, "/charges", body, key)
        pid = gate.wait_reached()
        lang.db.one("SELECT pg_terminate_backend(%s)", pid)
        # The module asks again by itself: the client sees one answer.
        wait_for("another backend waits at the gate", lambda: [p for p in gate.waiting() if p != pid])
        gate.open()
    equal(reply.result().status, 201, "status")
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def commit_answer_lost(lang):
    """The COMMIT has happened, its answer has not arrived: the module asks the key, and the client gets the answer."""
    order, key = unique(), f"k-{unique()}"
    with lang.db.gate() as gate:
        reply = Background(lang.server.post, "/charges", charge(order, gate=gate.number), key)
        gate.wait_reached()
        with lang.db.commits_wait():
            gate.open()
            lang.db.lose_commit_answer()
            reply = reply.result()
    charge_id = lang.db.one("SELECT id FROM charges WHERE order_id = %s", order)
    equal((reply.status, json.loads(reply.body)["charge_id"]), (201, charge_id), "answer")
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def backend_killed(lang):
    order, key = unique(), f"k-{unique()}"
    with lang.db.gate() as gate:
        body = charge(order, gate=gate.number)
        reply = Background(lang.server.persist, "/charges", body, key)
        os.kill(gate.wait_reached(), signal.SIGKILL)
        wait_for("the server has noticed, and ended all sessions", gate.is_lost)
        lang.db.conn = None
        lang.db.wait_up()
    equal(reply.result().status, 201, "status")
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def server_restarted(lang):
    order, key = unique(), f"k-{unique()}"
    with lang.db.gate() as gate:
        body = charge(order, gate=gate.number)
        reply = Background(lang.server.persist, "/charges", body, key)
        gate.wait_reached()
        lang.db.restart_immediately()
    equal(reply.result().status, 201, "status")
    equal(lang.db.count("charges", "order_id = %s", order), 1, "rows")


def busy_prints_holder(lang):
    """A duplicate that gets 409 prints who holds the key: the process of the first request."""
    key = f"k-{unique()}"
    with lang.db.gate() as gate:
        first = Background(lang.server.persist, "/charges", charge(unique(), gate=gate.number), key)
        pid = gate.wait_reached()
        equal(lang.server.post("/charges", charge(unique(), gate=gate.number), key).status, 409, "status of the duplicate")
        line = lang.server.wait_printed(f"key held by claim, process {pid}, since ")
        check("An open transaction has claimed the key." in line, "the line:", line)
        check(key not in line, "the line shows the key:", line)
        gate.open()
        first.result()


def wait_prints_reasons(lang):
    """A request that waits for its job in vain prints why the job does not run; one that waits for its end prints nothing."""
    order = unique()
    lang.db.rows("INSERT INTO orders VALUES (%s)", order)
    lang.db.rows("SELECT idem_pause('index')")
    try:
        equal(lang.server.post(f"/orders/{order}/touch", {"wait": 0.1}).status, 202, "status without a worker")
    finally:
        lang.db.rows("SELECT idem_resume('index')")
    job = lang.db.one("SELECT job_id FROM idem.job_status WHERE key = %s", f"order:{order}")
    line = lang.server.wait_printed(f"job {job} ")
    check(line.startswith(f"job {job} paused, since ") and line.endswith(": The queue is paused."), "the line:", line)
    worker = lang.worker()
    printed = len(lang.server.lines)
    equal(lang.server.post(f"/orders/{order}/touch", {"wait": 30}).status, 200, "status with a worker")
    equal(lang.db.one("SELECT version FROM indexed WHERE order_id = %s", order), 2, "indexed version")
    equal(lang.server.lines[printed:], [], "lines")
    worker.kill()


SCENARIOS = [
    header_missing,
    header_invalid,
    header_quoted,
    answer_and_replay,
    fifty_at_once,
    busy_prints_holder,
    wait_prints_reasons,
    fifty_without_gate,
    another_request,
    customers_apart,
    body_too_large,
    refusal_is_stored,
    failure_is_not_stored,
    client_aborts,
    program_killed,
    backend_terminated,
    commit_answer_lost,
    backend_killed,
    server_restarted,
]
