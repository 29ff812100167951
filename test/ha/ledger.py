"""The ledger: what the clients know, kept outside of every database.

An event is one transaction as its client saw it:
  acked    COMMIT has returned
  unknown  the connection was lost, or the answer was not a plain success, while COMMIT ran
  refused  the server raised an error before COMMIT; sqlstate says which
  aborted  the connection was lost before COMMIT

Every event has the server (port) and the timeline on which it ran, the position of WAL in the
transaction (lsn0) and after its COMMIT (lsn1), and the times of the client before the call (t0)
and after the answer (t1).  All clients are threads of one process, so these times are in order.
"""

import json
import threading
import time


class Event:
    __slots__ = ('what', 'who', 'round', 't0', 't1', 'port', 'tl', 'lsn0', 'lsn1', 'outcome',
                 'sqlstate', 'op', 'run', 'replay', 'key', 'token', 'job', 'enq', 'answer')

    def __init__(self, what, who, **values):
        for name in self.__slots__:
            setattr(self, name, None)
        self.what = what
        self.who = who
        self.replay = False
        self.t0 = time.monotonic()
        self.set(**values)

    def set(self, **values):
        for name, value in values.items():
            setattr(self, name, value)

    def has_written(self):
        """Whether the transaction wrote anything; then its COMMIT waits for a synchronous standby."""
        return not self.replay and any(value is not None for value in (self.run, self.token, self.enq))

    def as_dict(self):
        return {name: getattr(self, name) for name in self.__slots__
                if getattr(self, name) is not None}

    def __str__(self):
        return ' '.join('%s=%s' % item for item in self.as_dict().items())


class Ledger:
    def __init__(self, path):
        self.path = path
        self.lock = threading.Lock()
        self.events = []
        self.written = 0
        self.round = 0
        self.first_on = {}      # timeline: when its first commit was acknowledged
        self.acked = 0

    def add(self, event, outcome, sqlstate=None):
        event.t1 = time.monotonic()
        event.outcome = outcome
        event.sqlstate = sqlstate
        with self.lock:
            event.round = self.round
            self.events.append(event)
            if outcome == 'acked':
                self.acked += 1
                self.first_on.setdefault(event.tl, event.t1)

    def write(self):
        """Append the new events to the file, for a reader after a failure."""
        with open(self.path, 'a', encoding='utf-8') as file:
            for event in self.events[self.written:]:
                file.write(json.dumps(event.as_dict()) + '\n')
        self.written = len(self.events)
