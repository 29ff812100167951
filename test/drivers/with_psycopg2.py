"""psycopg2"""

import datetime

import psycopg2
from facts import POOLED, cancelled, end, fact, outcome
from psycopg2.extras import Json

conn = psycopg2.connect(POOLED)
cur = conn.cursor()


def ask(sql, *args):
    cur.execute(sql, args)
    return cur.fetchone()


def state(fn, *args):
    try:
        fn(*args)
    except psycopg2.Error as error:
        return error.pgcode


CLAIM = "SELECT claimed, status, result FROM idem_claim(%s, request => %s, wait => %s)"
fact("the first statement begins a transaction", ask(CLAIM, "p2", Json({"a": 1}), "0")[1], "claimed")
fact("conn.rollback() ends it", (conn.rollback(), ask(CLAIM, "p2", Json({"a": 1}), datetime.timedelta(0))[1])[1], "claimed")
fact("jsonb: Json(value), no cast; a str with JSON works, too", ask("SELECT idem_finish('p2', %s)", '{"x": [1]}')[0], True)
conn.commit()
fact("a jsonb result is a Python value", ask(CLAIM, "p2", Json({"a": 1}), "0"), (False, "finished", {"x": [1]}))
fact("a dict without Json is refused", outcome(ask, CLAIM, "p2", {"a": 1}, "0"), "ProgrammingError")
fact("SQLSTATE: error.pgcode", state(ask, CLAIM, "p2", Json({"a": 2}), "0"), "ID001")
cur.execute("COMMIT")
fact("COMMIT of a failed transaction: cursor.statusmessage is ROLLBACK", cur.statusmessage, "ROLLBACK")
state(ask, CLAIM, "p2", Json({"a": 2}), "0")
fact("conn.commit() of a failed transaction raises no error", outcome(conn.commit), None)
fact("SELECT f() gives a string", type(ask("SELECT idem_claim('p2')")[0]), str)
conn.rollback()
conn.autocommit = True
lease = ask("SELECT token, lease_until FROM idem_lease('p2l', %s)", "30 s")
fact("conn.autocommit = True for a lease; a token is an int", type(lease[0]), int)
fact("a token as parameter needs no cast", ask("SELECT idem_finish('p2l', '1', %s)", lease[0])[0], True)
job = ask("SELECT job_id FROM idem_enqueue('p2', %s)", Json({"n": 1}))[0]
job = ask("SELECT job_id, token, payload FROM idem_fetch('p2', lease => %s)", datetime.timedelta(seconds=5))
status = ask("SELECT status FROM idem_heartbeat(%s, %s, '5 s')", [job[0]], [job[1]])
fact("lists become arrays, no cast", status and status[0], "renewed")
ask("SELECT job_id FROM idem_enqueue('p2w')")
fact("CALL idem_wait in autocommit returns a row", ask("CALL idem_wait(%s, %s)", "p2w", "30 s"), (True,))
fact("a list is an array of queues", ask("CALL idem_wait_any(%s)", ["p2none", "p2w"]), (True, "p2w"))
conn.autocommit = False
fact("CALL idem_wait without autocommit: 25001", state(ask, "CALL idem_wait('p2w')"), "25001")
conn.rollback()
conn.autocommit = True
fact("conn.cancel() ends a wait", cancelled(conn.cancel, lambda: state(ask, "CALL idem_wait('p2none', '60 s')")), "57014")
fact("no prepared statements: works behind pgbouncer", all(ask(CLAIM, "p2", None, "0") for _ in range(20)), True)
end()
