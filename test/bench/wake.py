"""test/bench/wake.py: workers that learn of jobs in one of several ways, for wake.sh

Use: wake.py latency WAY WORKERS JOBS PAUSE
     wake.py work WAY WORKERS

WAY is how a worker learns of a job when it has found none:
    wait        CALL idem_wait
    listen      LISTEN: the enqueue calls pg_notify, and the worker waits for its socket
    poll=S      it sleeps for S seconds

latency: one session enqueues JOBS jobs, one at a time, with random pauses of PAUSE milliseconds on
average.  The workers fetch and complete one job at a time.  Prints the median and the 99th
percentile of the microseconds from the last moment before the enqueue commits, by the clock of
the server, until a worker has the answer to its fetch.  The answer to the enqueue comes later,
on a busy machine after the job has been fetched.

work: prints "ready" when the workers have begun, and goes on until standard input ends.  The workers
fetch and complete up to 100 jobs at a time.  Prints how many jobs they have completed, and how
often they were told of one.

Every worker is a process.  They all call libpq, as programs in C do, so that the client adds no
more than some microseconds.  LIBPQ is the library; PGHOST and the like choose the server.
"""

import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import random
import select
import struct
import sys
import time

CONNECTION_OK, COMMAND_OK, TUPLES_OK = 0, 1, 2      # libpq-fe.h
PAYLOAD = '{"account": 42, "amount": 9900}'
ENQUEUE = f"SELECT (idem_enqueue('wake', '{PAYLOAD}')).job_id, (extract(epoch FROM clock_timestamp()) * 1e6)::bigint"
BATCH = 100
WARM_UP = 10        # jobs that are not counted
REPORT = struct.Struct('qqq')
ignore = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)(lambda arg, message: None)


class Ended(Exception):
    """The server has ended the session."""


def load_libpq():
    lib = ctypes.CDLL(os.environ['LIBPQ'])
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    texts = ctypes.POINTER(text)
    for name, result, *args in (
            ('PQconnectdb', pointer, text),
            ('PQstatus', number, pointer),
            ('PQsocket', number, pointer),
            ('PQerrorMessage', text, pointer),
            ('PQexec', pointer, pointer, text),
            ('PQprepare', pointer, pointer, text, text, number, pointer),
            ('PQexecPrepared', pointer, pointer, text, number, texts, pointer, pointer, number),
            ('PQresultStatus', number, pointer),
            ('PQntuples', number, pointer),
            ('PQnfields', number, pointer),
            ('PQgetvalue', text, pointer, number, number),
            ('PQgetisnull', number, pointer, number, number),
            ('PQclear', None, pointer),
            ('PQsetNoticeProcessor', pointer, pointer, type(ignore), pointer),
            ('PQconsumeInput', number, pointer),
            ('PQnotifies', pointer, pointer),
            ('PQfreemem', None, pointer)):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, args
    return lib


libpq = load_libpq()


class Session:
    def __init__(self, name, **statements):
        self.conn = libpq.PQconnectdb(f"application_name='{name}'".encode())
        self.check(libpq.PQstatus(self.conn) == CONNECTION_OK)
        # the end of an idle session is a notice
        libpq.PQsetNoticeProcessor(self.conn, ignore, None)
        self.socket = select.poll()
        self.socket.register(libpq.PQsocket(self.conn), select.POLLIN)
        for key, statement in statements.items():
            libpq.PQclear(self.checked(libpq.PQprepare(self.conn, key.encode(), statement.encode(), 0, None)))

    def check(self, ok):
        if not ok:
            kind = RuntimeError if libpq.PQstatus(self.conn) == CONNECTION_OK else Ended
            raise kind(libpq.PQerrorMessage(self.conn).decode())

    def checked(self, result):
        self.check(libpq.PQresultStatus(result) in (COMMAND_OK, TUPLES_OK))
        return result

    def run(self, name, *params):
        """Run a prepared statement; returns its first row, or None, and when the answer was there, in microseconds."""
        values = (ctypes.c_char_p * len(params))(*params)
        result = libpq.PQexecPrepared(self.conn, name, len(params), values, None, None, 0)
        at = time.time_ns() // 1000
        self.checked(result)
        row = None
        if libpq.PQntuples(result) > 0:
            row = [None if libpq.PQgetisnull(result, 0, i) else libpq.PQgetvalue(result, 0, i)
                   for i in range(libpq.PQnfields(result))]
        libpq.PQclear(result)
        return row, at

    def execute(self, statement):
        libpq.PQclear(self.checked(libpq.PQexec(self.conn, statement.encode())))

    def take_notifications(self):
        n = 0
        while notification := libpq.PQnotifies(self.conn):
            libpq.PQfreemem(notification)
            n += 1
        return n

    def await_notification(self):
        while not self.take_notifications():
            self.socket.poll()
            self.check(libpq.PQconsumeInput(self.conn))


class Worker:
    """Fetches until nothing comes, then waits to be told of a job, and so on until its session is ended."""

    def __init__(self, way, write):
        self.way, _, seconds = way.partition('=')
        self.pause = float(seconds or 0)
        self.write = write
        self.taken = self.told = 0
        self.session = Session(
            'wake.py worker',
            wait="CALL idem_wait('wake', '30 s')",
            fetch="SELECT job_id, token FROM idem_fetch('wake', 1, '1 min')",
            complete='SELECT idem_complete($1, $2)',
            fetch_many=f"SELECT array_agg(job_id), array_agg(token) FROM idem_fetch('wake', {BATCH}, '1 min')",
            complete_many="SELECT count(*), count(*) FILTER (WHERE status <> 'completed') "
                          'FROM idem_complete_many($1::bigint[], $2::bigint[])')
        if self.way == 'listen':
            self.session.execute('LISTEN wake')

    def report(self, *numbers):
        os.write(self.write, REPORT.pack(*numbers))

    def take_one(self):
        row, at = self.session.run(b'fetch')
        if row is None:
            return False
        self.session.run(b'complete', *row)
        self.report(int(row[0]), at, 0)
        return True

    def take_many(self):
        row, _ = self.session.run(b'fetch_many')
        if row[0] is None:
            return False
        done, failed = self.session.run(b'complete_many', *row)[0]
        if failed != b'0':
            raise RuntimeError(f'{failed.decode()} jobs were not completed')
        self.taken += int(done)
        return True

    def wait(self):
        if self.way == 'wait':
            return self.session.run(b'wait')[0][0] == b't'
        if self.way == 'listen':
            self.session.await_notification()
        else:
            time.sleep(self.pause)
        return True

    def work(self, take):
        self.report(0, 0, 0)
        try:
            while True:
                while take():
                    pass
                self.told += self.wait()
        except Ended:
            self.report(-1, self.taken, self.told)


class Workers:
    """Processes that report through one pipe"""

    def __init__(self, way, n, take):
        self.read, write = os.pipe()
        self.processes = [multiprocessing.Process(target=self.work, args=(way, write, take)) for _ in range(n)]
        for process in self.processes:
            process.start()
        os.close(write)
        for _ in self.processes:
            self.next_report()

    @staticmethod
    def work(way, write, take):
        worker = Worker(way, write)
        worker.work(getattr(worker, take))

    def await_file(self, file):
        """Wait until the file can be read; no worker may end before."""
        if file not in multiprocessing.connection.wait([file, *(process.sentinel for process in self.processes)]):
            raise RuntimeError('a worker has ended')

    def read_report(self):
        report = os.read(self.read, REPORT.size)
        if not report:
            raise RuntimeError('the workers have ended')
        return REPORT.unpack(report)

    def next_report(self):
        self.await_file(self.read)
        return self.read_report()

    def end(self, session):
        """End their sessions; returns how many jobs they have taken, and how often they were told of one"""
        session.execute('SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
                        "WHERE application_name = 'wake.py worker'")
        ends = []
        while len(ends) < len(self.processes):
            kind, *numbers = self.read_report()
            if kind == -1:
                ends.append(numbers)
        for process in self.processes:
            process.join()
        return [sum(column) for column in zip(*ends)]


def measure_latency(way, n, jobs, pause):
    workers = Workers(way, n, 'take_one')
    session = Session('wake.py', enqueue=ENQUEUE + (", pg_notify('wake', '')" if way == 'listen' else ''))
    committed, fetched = {}, {}
    for _ in range(WARM_UP + jobs):
        time.sleep(random.uniform(0.5, 1.5) * pause / 1000)
        row, _ = session.run(b'enqueue')
        committed[int(row[0])] = int(row[1])
    while len(fetched) < len(committed):
        job_id, at, _ = workers.next_report()
        if job_id not in committed or job_id in fetched:
            raise RuntimeError(f'a worker has got job {job_id}')
        fetched[job_id] = at
    workers.end(session)
    times = sorted(fetched[job] - committed[job] for job in list(committed)[WARM_UP:])
    print('p50', times[len(times) // 2])
    print('p99', times[-1 - len(times) // 100])


def work(way, n):
    workers = Workers(way, n, 'take_many')
    session = Session('wake.py')
    print('ready', flush=True)
    workers.await_file(sys.stdin.fileno())
    taken, told = workers.end(session)
    print(taken, told)


def main(what, way, workers, *sizes):
    multiprocessing.set_start_method('fork')
    gc.disable()        # no pauses
    if what == 'latency':
        measure_latency(way, int(workers), *map(int, sizes))
    else:
        work(way, int(workers))


main(*sys.argv[1:])
