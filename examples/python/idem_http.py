"""The Idempotency-Key header for Flask (draft-ietf-httpapi-idempotency-key-header-07), on top of idem.py.

    idempotent = Idempotent(pool, scope=lambda: customer_of(flask.request))

    @app.post("/charges")
    @idempotent.once
    def charge(conn):                   # conn: the transaction of the key
        ...
        return {"charge_id": 1}, 201    # whatever Flask accepts; raise Refusal((body, 402)) to undo and store it

The first answer and every repetition are built from the same stored status, headers and body.
"""

import functools
import hashlib
import io
import re

import flask

from idem import Busy, Mismatch, Refusal, Stale, Undecided, leased, once, print_holders

# A structured-field string, or (many clients send that) the bare key; at most 1024 bytes, as idem allows.
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_BARE = re.compile(r"[!#-~][!-~]*")


def parse_key(header):
    """The key, or None if the header is not valid."""
    quoted = _QUOTED.fullmatch(header)
    if quoted:
        key = re.sub(r"\\(.)", r"\1", quoted[1])
    else:
        key = header if _BARE.fullmatch(header) else ""
    return key if 1 <= len(key) <= 1024 else None


def problem(status, title, **headers):
    body = flask.json.dumps({"title": title, "status": status})
    headers = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    return flask.Response(body, status, headers, content_type="application/problem+json")


def pack(rv):
    """A response as JSON: the body is text, because jsonb would change the order of its fields."""
    response = flask.make_response(rv)
    return {
        "status": response.status_code,
        "headers": [[name, value] for name, value in response.headers if name != "Content-Length"],
        "body": response.get_data().decode("utf-8"),
    }


MAX_BODY = 1 << 20  # a larger one gets 413


def read_body():
    """The body, or None if it is too large. The handler can read it again."""
    body = b""
    while len(body) <= MAX_BODY and (part := flask.request.stream.read(MAX_BODY + 1 - len(body))):
        body += part
    flask.request.stream = io.BytesIO(body)
    return body if len(body) <= MAX_BODY else None


class Idempotent:
    def __init__(self, pool, scope, ttl=None, wait="0"):
        """scope(): the customer, so that keys of two customers never meet; None if the program has only one.

        wait > 0 keeps a connection while it waits.
        """
        self.pool, self.scope, self.ttl, self.wait = pool, scope, ttl, wait

    def once(self, handler):
        """For handlers that work in the database: handler(conn, ...)."""

        def run(key, request, args):
            def work(conn):
                try:
                    return pack(handler(conn, **args))
                except Refusal as refusal:
                    raise Refusal(pack(refusal.result)) from None

            return once(self.pool, key, request, work, scope=self.scope(), ttl=self.ttl, wait=self.wait)

        return self._wrap(handler, run)

    def leased(self, call, lease=30):
        """For handlers that call the outside world: call(lease, key, ...) does that, handler(conn, outcome, ...) records it."""

        def decorate(handler):
            def run(key, request, args):
                def outside(lease):
                    try:
                        return call(lease, key, **args)
                    except Refusal as refusal:
                        raise Refusal(pack(refusal.result)) from None

                return leased(
                    self.pool, key, request, outside,
                    lambda conn, outcome: pack(handler(conn, outcome, **args)),
                    lease=lease, scope=self.scope(), ttl=self.ttl,
                )

            return self._wrap(handler, run)

        return decorate

    def _wrap(self, handler, run):
        @functools.wraps(handler)
        def view(**args):
            header = flask.request.headers.get("Idempotency-Key")
            if header is None:
                return problem(400, "The header Idempotency-Key is missing.")
            key = parse_key(header)
            if key is None:
                return problem(400, "The header Idempotency-Key is not valid: 1 to 1024 visible ASCII characters.")
            body = read_body()
            if body is None:
                return problem(413, "The body is too large.")
            request = {
                "method": flask.request.method,
                "path": flask.request.full_path,
                "sha256": hashlib.sha256(body).hexdigest(),
            }
            try:
                answer = run(key, request, args)
            except Busy as busy:
                print_holders(self.pool, key, self.scope())
                return problem(409, "A request with this key is being processed.", Retry_After=busy.retry_after)
            except Stale:
                return problem(409, "Another worker has taken over this request.", Retry_After=1)
            except Undecided:
                print_holders(self.pool, key, self.scope())
                return problem(409, "The outcome of this request is unknown: an operator has to decide.")
            except Mismatch:
                return problem(422, "This key was used with another request.")
            stored = answer.result
            response = flask.Response(stored["body"], stored["status"], [tuple(h) for h in stored["headers"]])
            if answer.replayed:
                response.headers["Idempotent-Replayed"] = "true"
            return response

        return view
