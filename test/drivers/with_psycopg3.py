"""psycopg 3"""

import datetime

import psycopg
from facts import POOLED, cancelled, end, fact, outcome
from psycopg.types.json import Json, Jsonb

CLAIM = "SELECT claimed, status, result FROM idem_claim(%s, request => %s, wait => %s)"


def ask(conn, sql, *args):
    return conn.execute(sql, args).fetchone()


def state(fn, *args):
    try:
        fn(*args)
    except psycopg.Error as error:
        return error.sqlstate


conn = psycopg.connect(POOLED, prepare_threshold=None)
fact("the first statement begins a transaction", ask(conn, CLAIM, "p3", Jsonb({"a": 1}), "0")[1], "claimed")
conn.rollback()
fact("timedelta is an interval", ask(conn, CLAIM, "p3", '{"a": 1}', datetime.timedelta(0))[1], "claimed")
fact("a str with JSON needs no cast in a call", ask(conn, "SELECT idem_finish('p3', %s)", '{"x": [1]}')[0], True)
conn.commit()
fact("a jsonb result is a Python value", ask(conn, CLAIM, "p3", Jsonb({"a": 1}), "0"), (False, "finished", {"x": [1]}))
fact("Json instead of Jsonb: 42883, there is no such function", state(ask, conn, CLAIM, "p3", Json({"a": 1}), "0"), "42883")
conn.rollback()
fact("SQLSTATE: error.sqlstate", state(ask, conn, CLAIM, "p3", Jsonb({"a": 2}), "0"), "ID001")
fact("COMMIT of a failed transaction: statusmessage is ROLLBACK", conn.execute("COMMIT").statusmessage, "ROLLBACK")
state(ask, conn, CLAIM, "p3", Jsonb({"a": 2}), "0")
fact("conn.commit() of a failed transaction raises no error", outcome(conn.commit), None)


def swallow():
    with conn.transaction():
        state(ask, conn, CLAIM, "p3", Jsonb({"a": 2}), "0")
    return "no error"


fact("conn.transaction() with an error that was swallowed", outcome(swallow), "no error")
fact("SELECT f() gives a string", type(ask(conn, "SELECT idem_claim('p3')")[0]), str)
conn.rollback()
conn.autocommit = True
token = ask(conn, "SELECT token FROM idem_lease('p3l', %s)", "30 s")[0]
fact("conn.autocommit = True for a lease; a token is an int", type(token), int)
fact("a token as parameter needs no cast", ask(conn, "SELECT idem_finish('p3l', '1', %s)", token)[0], True)
ask(conn, "SELECT job_id FROM idem_enqueue('p3', %s)", Jsonb({"n": 1}))
job = ask(conn, "SELECT job_id, token FROM idem_fetch('p3', lease => '5 s')")
status = ask(conn, "SELECT status FROM idem_heartbeat(%s::bigint[], %s::bigint[], '5 s')", [job[0]], [job[1]])[0]
fact("lists of int become arrays; cast them ::bigint[]", status, "renewed")
ask(conn, "SELECT job_id FROM idem_enqueue('p3w')")
fact("CALL idem_wait in autocommit returns a row", ask(conn, "CALL idem_wait(%s, %s)", "p3w", "30 s"), (True,))
fact("a list of str is an array of queues", ask(conn, "CALL idem_wait_any(%s)", ["p3none", "p3w"]), (True, "p3w"))
conn.autocommit = False
fact("CALL idem_wait without autocommit: 25001", state(ask, conn, "CALL idem_wait('p3w')"), "25001")
conn.rollback()
conn.autocommit = True
fact("conn.cancel() ends a wait", cancelled(conn.cancel, lambda: state(ask, conn, "CALL idem_wait('p3none', '60 s')")), "57014")
with conn.pipeline(), conn.transaction():
    first = conn.execute(CLAIM, ("p3p", None, "0"))
    second = conn.execute("SELECT idem_finish('p3p', '1')")
fact("pipeline mode works behind pgbouncer", (first.fetchone()[1], second.fetchone()[0]), ("claimed", True))


def prepared(threshold):
    """Two connections of a pool: each uses another server connection from time to time."""
    with psycopg.connect(POOLED, autocommit=True, prepare_threshold=threshold) as one:
        with psycopg.connect(POOLED, autocommit=True, prepare_threshold=None) as other:
            states = [state(one.execute, CLAIM, ("p3", None, "0")) for _ in range(10)]
            with other.transaction():  # takes the server connection that was used last
                other.execute("SELECT 1")
                states.append(state(one.execute, CLAIM, ("p3", None, "0")))
    return [s for s in states if s]


fact("default prepare_threshold behind pgbouncer: 26000 or 42P05", {"26000", "42P05"} & set(prepared(5)) != set(), True)
fact("prepare_threshold=None works behind pgbouncer", prepared(None), [])
end()
