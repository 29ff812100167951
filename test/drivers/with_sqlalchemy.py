"""SQLAlchemy (core and session, on psycopg2)"""

import json

from facts import POOLED, end, fact, outcome
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

# SQLAlchemy does not know postgres://
engine = create_engine(POOLED.replace("postgres://", "postgresql+psycopg2://"), future=True)
fact("a URL begins with postgresql, not with postgres", outcome(create_engine, POOLED), "NoSuchModuleError")

CLAIM = text("SELECT * FROM idem_claim(:key, request => CAST(:request AS jsonb), wait => '0')")
REQUEST = {"key": "sa", "request": json.dumps({"a": 1})}

with engine.begin() as conn:  # BEGIN, and COMMIT at the end
    row = conn.execute(CLAIM, REQUEST).one()
    conn.execute(text("SELECT idem_finish(:key, CAST(:result AS jsonb))"), {"key": "sa", "result": '{"x": 1}'})
fact("engine.begin() is a transaction; columns by name", row.status, "claimed")
with engine.begin() as conn:
    fact("a jsonb result is a Python value", conn.execute(CLAIM, REQUEST).one().result, {"x": 1})


def colons():
    with engine.begin() as conn:
        conn.execute(text("SELECT idem_finish(:key, :result::jsonb)"), {"key": "sa", "result": "1"})


fact(":name::jsonb is not a parameter: write CAST(:name AS jsonb)", outcome(colons), "ProgrammingError")


def mismatch():
    try:
        with engine.begin() as conn:
            conn.execute(CLAIM, {"key": "sa", "request": "2"})
    except DBAPIError as error:
        return error.orig.pgcode


fact("SQLSTATE: error.orig.pgcode", mismatch(), "ID001")


def swallow(last):
    with engine.begin() as conn:
        conn.execute(CLAIM, {"key": "sa2", "request": "1"})
        try:
            conn.execute(text("SELECT 1 / 0"))
        except DBAPIError:
            pass
        if last:
            conn.execute(text("SELECT idem_finish('sa2')"))
    return "no error"


fact("an error that was swallowed: begin() ends without error, rolled back", outcome(swallow, False), "no error")
fact("idem_finish as the last statement notices it", outcome(swallow, True), "InternalError")
auto = engine.execution_options(isolation_level="AUTOCOMMIT")
with auto.connect() as conn:
    token = conn.execute(text("SELECT token FROM idem_lease('sal', '30 s')")).scalar_one()
    fact('isolation_level="AUTOCOMMIT" for a lease; a token is an int', type(token), int)
    done = conn.execute(text("SELECT idem_finish('sal', '1', :token)"), {"token": token}).scalar_one()
    fact("a token as parameter needs no cast", done, True)
    conn.execute(text("SELECT job_id FROM idem_enqueue('saw')"))
    ready = conn.execute(text("CALL idem_wait(:queue, '30 s')"), {"queue": "saw"}).scalar_one()
    fact('isolation_level="AUTOCOMMIT" for CALL idem_wait', ready, True)


def wait_in_transaction():
    with engine.connect() as conn:
        try:
            conn.execute(text("CALL idem_wait('saw')"))
        except DBAPIError as error:
            return error.orig.pgcode


fact("CALL idem_wait without it: 25001", wait_in_transaction(), "25001")
with engine.connect() as conn:
    conn.execute(text("SELECT * FROM idem_claim('sa3')"))
with engine.connect() as conn:
    left = conn.execute(text("SELECT count(*) FROM idem_get('sa3')")).scalar_one()
fact("connect() without commit() rolls back at the end", left, 0)
end()
