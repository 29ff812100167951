"""The example program: a shop that charges, mails and indexes each order once.

app.py serve PORT | app.py work; DATABASE_URL and WORKER_URL name the database.
"""

import json
import os
import signal
import sys

import flask
import psycopg
from psycopg_pool import ConnectionPool
from werkzeug.serving import WSGIRequestHandler, make_server

from idem import Refusal, wait_for_job
from idem_http import Idempotent
from idem_worker import Worker


def open_pool(url):
    # pgbouncer in transaction mode: no prepared statements
    return ConnectionPool(url, min_size=2, max_size=10, kwargs={"prepare_threshold": None})


def answer(status, body, **headers):
    return flask.Response(json.dumps(body), status, headers, content_type="application/json")


# It stands for a mail server: a connection of its own, in autocommit.
def send_mail(url, to, gate=None):
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as conn:
        conn.execute("INSERT INTO outside (what) VALUES ('mail:' || %s)", (to,))
        if gate is not None:
            conn.execute("SELECT pg_advisory_lock(%s), pg_advisory_unlock(%s)", (gate, gate))


def make_app(pool, url):
    app = flask.Flask(__name__)
    idempotent = Idempotent(pool, scope=lambda: flask.request.headers.get("X-Customer"))  # stands for a login

    @app.get("/health")
    def health():
        return "ok"

    @app.route("/charges", methods=["POST", "PUT"])
    @idempotent.once
    def charge(conn):
        asked = flask.request.get_json()
        (charge_id,) = conn.execute(
            "INSERT INTO charges (order_id, cents) VALUES (%s, %s) RETURNING id", (asked["order"], asked["cents"])
        ).fetchone()
        if "gate" in asked:
            conn.execute("SELECT pg_advisory_xact_lock(%s)", (asked["gate"],))
        if asked.get("fail") == "throw":
            raise RuntimeError("asked to throw")
        if asked.get("fail") == "denied":
            conn.execute("SELECT * FROM forbidden")
        if asked.get("fail") == "swallow":
            try:
                conn.execute("SELECT * FROM forbidden")
            except psycopg.Error:
                pass  # a mistake: the transaction has failed
        if asked["cents"] > 100000:
            raise Refusal(answer(402, {"error": "too much"}))
        body = {"order": asked["order"], "charge_id": charge_id, "cents": asked["cents"]}
        return answer(201, body, Location=f"/charges/{charge_id}")

    def mail_outside(lease, key):
        asked = flask.request.get_json()
        send_mail(url, asked["to"], asked.get("gate"))

    @app.post("/mails")
    @idempotent.leased(mail_outside, lease=10)
    def mail(conn, outcome):
        to = flask.request.get_json()["to"]
        conn.execute("INSERT INTO sent (recipient) VALUES (%s)", (to,))
        return answer(201, {"sent": to})

    @app.post("/orders/<int:order>/touch")
    def touch(order):
        with pool.connection() as conn, conn.transaction() as tx:
            conn.execute("UPDATE orders SET version = version + 1 WHERE id = %s", (order,))
            (job_id,) = conn.execute(
                "SELECT job_id FROM idem_enqueue('index', %s::jsonb, key => %s)",
                (json.dumps({"order": order}), f"order:{order}"),
            ).fetchone()
            asked = flask.request.get_json()
            if asked.get("rollback"):
                raise psycopg.Rollback(tx)
        if asked.get("rollback"):
            return answer(409, {"touched": None})
        if "wait" in asked and wait_for_job(pool, job_id, asked["wait"]) not in ("done", "gone"):
            return answer(202, {"touched": order})
        return answer(200, {"touched": order})

    return app


def index_order(conn, job):
    # Two runs of one key can overlap. The lock puts them in order: the later one reads the later version.
    order, version = conn.execute(
        "SELECT id, version FROM orders WHERE id = %s FOR NO KEY UPDATE", (job.payload["order"],)
    ).fetchone()
    conn.execute(
        "INSERT INTO indexed VALUES (%s, %s) ON CONFLICT (order_id) DO UPDATE SET version = excluded.version",
        (order, version),
    )


# A schedule enqueues this job, see work().
def heal(conn, job):
    conn.execute("SELECT enqueue_stale_orders()")


def serve(port):
    url = os.environ["DATABASE_URL"]
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    server = make_server("127.0.0.1", port, make_app(open_pool(url), url), threaded=True)
    print("ready", flush=True)
    server.serve_forever()


def work():
    url = os.environ["WORKER_URL"]

    def mail(job, lost):
        if job.attempt <= job.payload.get("fail", 0):
            raise RuntimeError("asked to fail")
        send_mail(url, job.payload["to"], job.payload.get("gate"))

    pool = open_pool(url)
    with pool.connection() as conn:  # at each start: the next tick stays as it is
        conn.execute("SELECT idem_schedule('heal', 'heal', every => '1 hour')")
    worker = Worker(pool, wait=60, lease=10)
    worker.transaction("index", index_order)
    worker.transaction("heal", heal)
    worker.leased("mail", mail)

    def stop(*_):
        worker.stop()
        os.write(1, b"stopping\n")

    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    worker.run()


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1] == "serve" else work()
