"""Django (on psycopg2)"""

import json
from urllib.parse import urlsplit

import django
from django.conf import settings
from facts import POOLED, end, fact, outcome

url = urlsplit(POOLED)
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql", "NAME": "shop", "USER": url.username, "PASSWORD": url.password,
            "HOST": url.hostname, "PORT": url.port, "DISABLE_SERVER_SIDE_CURSORS": True,
        }
    }
)
django.setup()

from django.db import Error, connection, transaction  # noqa: E402

CLAIM = "SELECT status, result FROM idem_claim(%s, request => %s::jsonb, wait => '0')"


def ask(sql, *args):
    with connection.cursor() as cur:
        cur.execute(sql, args)
        return cur.fetchone()


with transaction.atomic():
    first = ask(CLAIM, "dj", json.dumps({"a": 1}))
    ask("SELECT idem_finish(%s, %s::jsonb)", "dj", json.dumps({"x": 1}))
fact("transaction.atomic() is a transaction", first[0], "claimed")
fact("a jsonb result is a string: json.loads() it", ask(CLAIM, "dj", json.dumps({"a": 1})), ("finished", '{"x": 1}'))
ask(CLAIM, "dj0", "1")
fact("without atomic() the claim commits at once", ask("SELECT status FROM idem_get('dj0')")[0], "finished")


def mismatch():
    try:
        ask(CLAIM, "dj", "2")
    except Error as error:
        return error.__cause__.pgcode


fact("SQLSTATE: error.__cause__.pgcode", mismatch(), "ID001")


def refused():
    with transaction.atomic():
        ask(CLAIM, "dj1", "1")
        try:
            with transaction.atomic():  # a savepoint
                ask("SELECT 1 / 0")
        except Error:
            ask("SELECT idem_finish('dj1', '402')")


refused()
fact("atomic() inside atomic() is a savepoint: the claim stays", ask("SELECT result FROM idem_get('dj1')")[0], "402")


def swallow(last):
    with transaction.atomic():
        ask(CLAIM, "dj2", "1")
        try:
            ask("SELECT 1 / 0")
        except Error:
            pass
        if last:
            ask("SELECT idem_finish('dj2')")
    return "no error"


fact("an error that was swallowed: atomic() ends without error", outcome(swallow, False), "no error")
fact("… and the claim is gone", ask("SELECT count(*) FROM idem_get('dj2')")[0], 0)
fact("idem_finish as the last statement notices it", outcome(swallow, True), "InternalError")
token = ask("SELECT token FROM idem_lease('djl', '30 s')")[0]
fact("a token is an int", type(token), int)
fact("a token as parameter needs no cast", ask("SELECT idem_finish('djl', '1', %s)", token)[0], True)
ask("SELECT job_id FROM idem_enqueue('djw')")
fact("CALL idem_wait outside of atomic()", ask("CALL idem_wait(%s, '30 s')", "djw"), (True,))


def wait_in_transaction():
    try:
        with transaction.atomic():
            ask("CALL idem_wait('djw')")
    except Error as error:
        return error.__cause__.pgcode


fact("CALL idem_wait inside of atomic() (ATOMIC_REQUESTS): 25001", wait_in_transaction(), "25001")
end()
