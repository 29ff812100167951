"""What the scenarios use: the program under test, HTTP, the database, and waiting for states.

Nothing here sleeps for a fixed time to let something happen: wait_for() asks again until a state is there.
"""

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import namedtuple

import psycopg2

DEADLINE = 30  # seconds for anything that has to happen

Reply = namedtuple("Reply", "status headers body")


class Failed(Exception):
    """A scenario saw something else than it should."""


def check(condition, *what):
    if not condition:
        raise Failed(" ".join(str(w) for w in what))


def equal(got, wanted, what):
    check(got == wanted, f"{what}: got {got!r}, wanted {wanted!r}")


def wait_for(what, probe, deadline=DEADLINE):
    """The first true value of probe()."""
    end = time.monotonic() + deadline
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > end:
            raise Failed(f"waited {deadline} s in vain: {what}")
        time.sleep(0.02)


class Db:
    """The superuser of the server, in autocommit, over the private socket."""

    def __init__(self):
        self.conn = None

    def _connect(self):
        conn = psycopg2.connect(host=os.environ["PGHOST"], port=os.environ["PGPORT"], user="postgres", dbname="shop")
        conn.autocommit = True
        return conn

    def rows(self, sql, *args):
        if self.conn is None or self.conn.closed:
            self.conn = self._connect()
        try:
            with self.conn.cursor() as cur:
                cur.execute(sql, args)
                return cur.fetchall() if cur.description else []
        except psycopg2.OperationalError:
            self.conn = None
            raise

    def one(self, sql, *args):
        rows = self.rows(sql, *args)
        return rows[0][0] if rows else None

    def count(self, table, condition, *args):
        return self.one(f"SELECT count(*) FROM {table} WHERE {condition}", *args)

    def restart_immediately(self):
        self.conn = None
        subprocess.run(
            ["pg_ctl", "-D", os.environ["EXAMPLES_PGDATA"], "-w", "-s", "-m", "immediate",
             "-l", os.environ["EXAMPLES_PGDATA"] + ".log", "restart"],
            check=True,
        )

    @contextlib.contextmanager
    def setting(self, name, value):
        """A setting of the server, for all sessions."""
        before = self.one(f"SHOW {name}")
        self.rows(f"ALTER SYSTEM SET {name} = '{value}'")
        self.rows("SELECT pg_reload_conf()")
        wait_for("the setting", lambda: self.one(f"SHOW {name}") != before)
        try:
            yield
        finally:
            self.rows(f"ALTER SYSTEM RESET {name}")
            self.rows("SELECT pg_reload_conf()")
            wait_for("the setting", lambda: self.one(f"SHOW {name}") == before)

    def wait_up(self):
        def up():
            try:
                return self.one("SELECT NOT pg_is_in_recovery()")
            except psycopg2.Error:
                self.conn = None
                return False

        wait_for("the server accepts connections", up)

    @contextlib.contextmanager
    def commits_wait(self):
        """Every COMMIT that writes happens, but waits for a standby that does not exist before it answers."""
        self.rows("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        self.rows("SELECT pg_reload_conf()")
        wait_for("the setting", lambda: self.one("SHOW synchronous_standby_names") == "nobody")
        try:
            yield
        finally:
            self.rows("ALTER SYSTEM RESET synchronous_standby_names")
            self.rows("SELECT pg_reload_conf()")
            wait_for("the setting", lambda: self.one("SHOW synchronous_standby_names") == "")

    def lose_commit_answer(self):
        """Terminate the first backend of the program that has committed and waits: its client gets no answer."""
        sql = "SELECT pid FROM pg_stat_activity WHERE usename = 'shop' AND wait_event = 'SyncRep'"
        pid = wait_for("a COMMIT waits", lambda: self.one(sql))
        self.rows("SELECT pg_terminate_backend(%s)", pid)
        wait_for("the backend is gone", lambda: not self.count("pg_stat_activity", "pid = %s", pid))

    @contextlib.contextmanager
    def gate(self):
        """Hold an advisory lock: a request that asks for this gate stops there. yields a Gate."""
        conn = self._connect()
        gate = Gate(self, conn, next(_numbers))
        with conn.cursor() as cur:
            cur.execute("SELECT pg_advisory_lock(%s)", (gate.number,))
        try:
            yield gate
        finally:
            gate.open()


class Gate:
    def __init__(self, db, conn, number):
        self.db, self.conn, self.number = db, conn, number

    def open(self):
        self.conn.close()

    def is_lost(self):
        """Has the server ended the session that holds the gate?"""
        try:
            with self.conn.cursor() as cur:
                cur.execute("SELECT 1")
        except psycopg2.Error:
            return True
        return False

    def waiting(self):
        """Pids of backends that wait at the gate."""
        return [
            pid for (pid,) in self.db.rows(
                "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s AND classid = 0",
                self.number,
            )
        ]

    def wait_reached(self):
        return wait_for("a backend waits at the gate", self.waiting)[0]


# Languages, and runs on a server that is left running, share one database.
_numbers = itertools.count(int(time.time()) % 1000000 * 1000)


def unique():
    """A number that no other scenario has: an order, part of a key."""
    return next(_numbers)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Program:
    """`start serve PORT` or `start work` of one language, in a process group of its own."""

    running = []

    def __init__(self, directory, log, *args):
        self.args, self.log = [os.path.join(directory, "start"), *args], log
        self.process = None
        self.stopping = threading.Event()
        self.lines = []  # what it has printed since it was ready

    def start(self):
        self.process = subprocess.Popen(
            self.args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True
        )
        Program.running.append(self)
        line = self.process.stdout.readline()
        while line and line.strip() != b"ready":
            self.log.write(line)
            line = self.process.stdout.readline()
        check(line, "the program ended before it was ready:", self.args)
        threading.Thread(target=self._copy, args=(self.process.stdout,), daemon=True).start()
        return self

    def _copy(self, stream):
        for line in stream:
            if line.strip() == b"stopping":
                self.stopping.set()
            self.lines.append(line.decode().strip())
            self.log.write(line)
            self.log.flush()

    def wait_printed(self, begin):
        """The first line that begins like this."""
        return wait_for(f"the program prints {begin}", lambda: next((l for l in list(self.lines) if l.startswith(begin)), None))

    def kill(self):
        """kill -9, the whole group."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def terminate(self):
        """SIGTERM. A signal arrives some time later: the program says when it knows."""
        os.kill(self.process.pid, signal.SIGTERM)
        check(self.stopping.wait(DEADLINE), "the program did not say that it is stopping")

    def wait(self):
        return self.process.wait(DEADLINE)

    @classmethod
    def kill_all(cls):
        for program in cls.running:
            program.kill()


class Server(Program):
    def __init__(self, directory, log):
        self.port = free_port()
        super().__init__(directory, log, "serve", str(self.port))

    def request(self, method, path, body, key=None, headers=()):
        """One request; raises OSError or HTTPException if the connection breaks."""
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2 * DEADLINE)
        try:
            conn.putrequest(method, path)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            conn.putheader("Content-Type", "application/json")
            conn.putheader("Content-Length", str(len(data)))
            if key is not None:
                conn.putheader("Idempotency-Key", key)
            for name, value in headers:
                conn.putheader(name, value)
            conn.endheaders(data)
            response = conn.getresponse()
            return Reply(response.status, dict((k.lower(), v) for k, v in response.getheaders()), response.read())
        finally:
            conn.close()

    def post(self, path, body, key=None):
        return self.request("POST", path, body, key)

    def persist(self, path, body, key):
        """What a good client does: ask again, with the same key, until there is an answer. Retry-After is obeyed."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            try:
                reply = self.post(path, body, key)
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
                continue
            if reply.status == 409:
                time.sleep(int(reply.headers["retry-after"]))
            elif reply.status >= 500:
                time.sleep(0.1)
            else:
                return reply
        raise Failed(f"no answer for {key} in {DEADLINE} s")

    def abort(self, path, body, key):
        """Send a request; the returned socket is closed by the caller before the answer comes."""
        data = json.dumps(body).encode()
        s = socket.create_connection(("127.0.0.1", self.port))
        s.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Idempotency-Key: {key}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        return s

    def raw_status(self, path, body, header):
        """The status of a request whose Idempotency-Key header is these bytes."""
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE) as s:
            s.sendall(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
                + b"Idempotency-Key: " + header
                + f"\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
            )
            answer = b""
            while b"\r\n" not in answer:
                chunk = s.recv(4096)
                if not chunk:
                    break
                answer += chunk
        check(answer.startswith(b"HTTP/1.1 "), "no HTTP answer:", answer)
        return int(answer.split()[1])


class Background:
    """Call a function in a thread; result() returns what it returned or raises what it raised."""

    def __init__(self, fn, *args):
        self.value = self.error = None
        self.thread = threading.Thread(target=self._run, args=(fn, args), daemon=True)
        self.thread.start()

    def _run(self, fn, args):
        try:
            self.value = fn(*args)
        except Exception as error:  # handed to result()
            self.error = error

    def result(self):
        self.thread.join(3 * DEADLINE)
        check(not self.thread.is_alive(), "a request got no answer")
        if self.error:
            raise self.error
        return self.value
