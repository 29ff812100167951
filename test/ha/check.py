"""The checker: compares the ledger of the clients with the primary that has survived.

A timeline ends at its fork point, the position at which its successor begins.  A commit on a
timeline of the surviving history is kept if its record lies before the fork point, and a commit
on any other timeline, or behind the fork point, is lost.  The checker knows the position of WAL
before and after each commit: `kept` and `lost` are certain, `open` is a commit for which the fork
point lies between the two.

Asynchronous replication may lose commits: what is missing is explained if its commit is not
`kept`.  With synchronous replication nothing is explained.
"""

import bisect
import collections

SHOWN = 3


class History:
    """The timelines of the surviving primary and where each of them was left."""

    def __init__(self, query):
        self.last = int(query('SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)')[0][0], 16)
        self.fork = {}
        if self.last > 1:
            text = query("SELECT pg_read_file('pg_wal/%08X.history')" % self.last)[0][0]
            for line in text.splitlines():
                fields = line.split()
                if fields:
                    high, low = fields[1].split('/')
                    self.fork[int(fields[0])] = (int(high, 16) << 32) + int(low, 16)

    def fate(self, event):
        if event.tl == self.last:
            return 'kept'
        fork = self.fork.get(event.tl)
        if fork is None or (event.lsn0 is not None and event.lsn0 >= fork):
            return 'lost'
        if event.lsn1 is not None and event.lsn1 <= fork:
            return 'kept'
        return 'open'


class Result:
    """What a check has found."""

    def __init__(self):
        self.rules = []         # (name, violations: [(round, text)])
        self.counts = collections.defaultdict(collections.Counter)      # round: counter
        self.unknown_found = 0  # commits without an answer whose rows are there

    def rule(self, name, violations):
        self.rules.append((name, list(violations)))

    def failed(self):
        return [rule for rule in self.rules if rule[1]]

    def show(self):
        for name, violations in self.failed():
            print('FAILED  %s: %d violations' % (name, len(violations)))
            for _, text in violations[:SHOWN]:
                print('        ' + text.replace('\n', '\n            '))


class Checker:
    def __init__(self, query, ledger, sync):
        self.sync = sync
        self.result = Result()
        self.history = History(query)
        self.events = list(ledger.events)
        self.acked = [event for event in self.events if event.outcome == 'acked']
        self.fates = {id(event): self.history.fate(event) for event in self.acked}
        # rows of the surviving database
        self.ops = collections.defaultdict(list)        # op: runs
        self.stored = {}                                # run: the run in the result of its key
        for op, run, result in query(
                "SELECT op, run, (SELECT g.result ->> 'run' FROM idem_get(o.key) AS g) FROM ha.ops AS o"):
            self.ops[op].append(run)
            self.stored[run] = result
        self.fenced = {run: (key, token) for key, token, run in query('SELECT key, token, run FROM ha.fenced')}
        self.want = {row[0]: row[1:] for row in query('SELECT enq, job_id FROM ha.want')}
        self.runs = {row[0]: row[1:] for row in query('SELECT run, job_id, done, enq FROM ha.runs')}
        self.tick_runs = {run for (run,) in query('SELECT run FROM ha.ticks')}
        self.query = query

    def count(self, event, what, number=1):
        self.result.counts[event.round][what] += number

    def fate(self, event):
        return self.fates[id(event)]

    def has(self, event):
        """Whether an acknowledged transaction is there; None: it wrote nothing."""
        if event.what in ('claim', 'call', 'lease') and not event.replay:
            return event.run in self.ops[event.op]
        if event.what == 'fence':
            return event.run in self.fenced
        if event.what == 'enqueue':
            return event.enq in self.want
        if event.what == 'job':
            return event.run in self.runs
        if event.what == 'tick' and event.token is not None:
            return event.run in self.tick_runs
        if event.token is not None:     # a lease or a fetch has no row of ours
            return self.fate(event) != 'lost'
        return None

    def describe(self, event):
        fork = self.history.fork.get(event.tl)
        return '%s; fork of timeline %d: %s, so %s' % (event, event.tl, fork, self.fate(event))

    # -- (2) nothing is lost ----------------------------------------------------

    def lost(self):
        for event in self.acked:
            there = self.has(event)
            if there is None:
                continue
            self.count(event, 'commits')
            if not there:
                explained = self.fate(event) != 'kept' and not self.sync
                self.count(event, 'lost explained' if explained else 'lost')
                if self.fate(event) == 'open':
                    self.count(event, 'lost open')
                if not explained:
                    yield event.round, 'lost: ' + self.describe(event)

    def undead(self):
        """The fork points tell the truth: what lies behind them is not there."""
        for event in self.acked:
            if self.has(event) and self.fate(event) == 'lost':     # seen in its row
                yield event.round, 'is there: ' + self.describe(event)

    # -- (1) nothing is done twice ----------------------------------------------

    def by_op(self):
        by_op = collections.defaultdict(list)
        for event in self.acked:
            if event.op is not None:
                by_op[event.op].append(event)
        return by_op

    def doubled(self):
        for op, runs in self.ops.items():
            if len(runs) > 1:
                events = [event for event in self.events if event.op == op]
                yield max(event.round for event in events), '\n'.join(
                    ['%s has %d rows: %s' % (op, len(runs), ' '.join(runs))] + list(map(str, events)))

    def acked_twice(self):
        for op, events in self.by_op().items():
            runs = [event for event in events if not event.replay]
            for event in runs:
                self.count(event, 'claims')
            if len(runs) < 2:
                continue
            gone = [event for event in runs if not self.has(event)]
            explained = (not self.sync and len(gone) >= len(runs) - 1
                         and all(self.fate(event) != 'kept' for event in gone))
            # the round of the run that nobody can see any more
            self.count((gone or runs)[0], 'twice explained' if explained else 'twice')
            if not explained:
                yield runs[-1].round, '\n'.join(['%s acknowledged %d times as run' % (op, len(runs))]
                                                + [self.describe(event) for event in events])

    def run_again(self):
        """A run whose server knew of an earlier one, whether or not both are lost by now."""
        for op, events in self.by_op().items():
            runs = [event for event in events if not event.replay]
            for later in runs:
                for first in runs:
                    if first.t1 < later.t0 and self.knew(later, first):
                        yield later.round, '%s\nfirst: %s\nagain: %s' % (op, self.describe(first), self.describe(later))

    def knew(self, later, first):
        """Whether the commit of first was in the history of the server on which later ran."""
        return later.tl == first.tl or (later.tl > first.tl and self.fate(first) == 'kept'
                                        and (later.tl in self.history.fork or later.tl == self.history.last))

    def answers(self):
        """Every answer that was not lost names the run whose row is there."""
        for op, events in self.by_op().items():
            rows = self.ops[op]
            for event in events:
                if event.run in rows:
                    continue
                if event.replay:
                    explained = self.fate(event) != 'kept' and not self.sync
                    self.count(event, 'replays of lost runs' if explained else 'wrong replays')
                    if not explained:
                        yield event.round, 'the row is %s: %s' % (rows, self.describe(event))
            kept = [event for event in events if self.fate(event) == 'kept']
            if kept and rows and kept[-1].run != rows[-1]:
                yield kept[-1].round, 'the row is %s, the last answer was: %s' % (rows, kept[-1])

    def results(self):
        for op, runs in self.ops.items():
            for run in runs:
                if self.stored.get(run) != run:
                    yield 0, '%s: the row has %s, the result of the key %s' % (op, run, self.stored.get(run))

    def strangers(self):
        """Rows that no transaction of the ledger has written."""
        known = {event.run for event in self.events} | {event.enq for event in self.events}
        for run in [run for runs in self.ops.values() for run in runs] + list(self.fenced) + list(self.want) \
                + list(self.runs):
            if run not in known:
                yield 0, 'nobody wrote %s' % run

    # -- (3) tokens grow ----------------------------------------------------------

    def tokens(self, what, name):
        taken = collections.defaultdict(list)
        for event in self.acked:
            if event.what == what and event.token is not None:
                taken[getattr(event, name)].append(event)
        for events in taken.values():
            events.sort(key=lambda event: event.t1)
            highest = self.highest(events)
            for event in events:
                before = highest(event.t0)
                if before is not None and before.token >= event.token:
                    self.count(event, 'tokens back')
                    yield event.round, 'before: %s\nafter: %s' % (self.describe(before), self.describe(event))

    @staticmethod
    def highest(events):
        """A function: which of these has the highest token of those answered before a time."""
        times = [event.t1 for event in events]
        best = []
        for event in events:
            best.append(event if not best or event.token > best[-1].token else best[-1])

        def find(time):
            place = bisect.bisect_left(times, time)
            return best[place - 1] if place else None
        return find

    def old_tokens(self):
        """No fence, finish or complete with an old token after a new one was acknowledged."""
        for take, use, name in (('take', ('fence', 'lease'), 'key'), ('fetch', ('job',), 'job')):
            taken = collections.defaultdict(list)
            used = []
            for event in self.acked:
                if event.what == take and event.token is not None:
                    taken[getattr(event, name)].append(event)
                elif event.what in use:
                    used.append(event)
            find_any, find_kept, find_same = {}, {}, {}
            by_server = collections.defaultdict(list)
            for thing, events in taken.items():
                events.sort(key=lambda event: event.t1)
                find_any[thing] = self.highest(events)
                find_kept[thing] = self.highest([event for event in events if self.fate(event) == 'kept'])
                for event in events:
                    by_server[thing, event.tl].append(event)
            for place, events in by_server.items():
                find_same[place] = self.highest(events)
            for event in used:
                thing = getattr(event, name)
                self.count(event, 'tokens used')
                newer = find_any[thing](event.t0) if thing in find_any else None
                if newer is None or newer.token <= event.token:
                    continue
                kept = find_kept[thing](event.t0)
                same = find_same[thing, event.tl](event.t0) if (thing, event.tl) in find_same else None
                if self.sync or (same and same.token > event.token) or (self.has(event) and kept and kept.token > event.token):
                    self.count(event, 'old tokens')
                    yield event.round, 'newer: %s\nused: %s' % (self.describe(newer), self.describe(event))
                else:
                    self.count(event, 'old tokens explained')

    # -- (4) jobs -----------------------------------------------------------------

    def completed_twice(self):
        acked = collections.Counter((event.job, event.tl) for event in self.acked
                                    if event.what == 'job' and event.answer == 'done')
        for (job, timeline), times in acked.items():
            if times > 1:
                yield 0, 'job %d was completed %d times on timeline %d' % (job, times, timeline)
        done = collections.Counter(job for job, is_done, _ in self.runs.values() if is_done)
        for job, times in done.items():
            if times > 1:
                yield 0, 'job %d was completed %d times' % (job, times)

    def not_run(self):
        """After the queue was drained: every enqueue is followed by a completed run that sees it."""
        for enq, job, outcome in self.query(
                'SELECT w.enq, w.job_id, w.outcome FROM ha.want AS w'
                ' WHERE NOT EXISTS (SELECT FROM ha.runs AS r WHERE r.job_id = w.job_id AND r.done'
                '                      AND pg_visible_in_snapshot(w.xid, r.snap))'):
            yield 0, '%s (%s): no completed run of job %d has seen it' % (enq, outcome, job)

    def other_payload(self):
        for run, (job, _, enq) in self.runs.items():
            if enq not in self.want or self.want[enq][0] != job:
                yield 0, '%s of job %d has the payload of %s: %s' % (run, job, enq, self.want.get(enq))

    def ticks(self):
        """Each tick from the first one to the next one: its job waits, or it has been done once."""
        for tick, waiting, done in self.query('''
            SELECT t.tick, t.waiting, t.done
              FROM (SELECT x.tick,
                           (SELECT count(*) FROM idem.jobs AS j WHERE j.queue = 'ticks' AND j.key = x.key) AS waiting,
                           (SELECT count(*) FROM ha.ticks AS d WHERE d.key = x.key) AS done
                      FROM ha.first_tick AS f, idem.schedules AS s,
                           LATERAL (SELECT g AS tick, 'tick@' || to_char(g AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') AS key
                                      FROM generate_series(f.tick, s.next_tick - interval '1 s', interval '1 s') AS g) AS x) AS t
             WHERE t.waiting + t.done <> 1'''):
            yield 0, 'the tick %s has %d jobs that wait, and was done %d times' % (tick, waiting, done)
        for (late,) in self.query("SELECT next_tick FROM idem.schedules WHERE next_tick < clock_timestamp() - interval '10 s'"):
            yield 0, 'no tick since %s' % late

    def left(self):
        for (job,) in self.query("SELECT job_id FROM idem.job_status WHERE queue = 'ha'"
                                 " AND state NOT IN ('done', 'dead', 'cancelled')"):
            yield 0, 'job %d is left after the drain' % job

    def dead(self):
        for job, state in self.query("SELECT job_id, state FROM idem.job_status WHERE state IN ('dead', 'cancelled')"):
            yield 0, 'job %d is %s' % (job, state)

    def check(self):
        rule = self.result.rule
        self.result.unknown_found = sum(
            1 for event in self.events if event.outcome == 'unknown' and event.has_written()
            and (event.run in self.stored or event.run in self.fenced or event.run in self.runs
                 or event.enq in self.want))
        rule('every acknowledged commit is there', self.lost())
        rule('no commit behind a fork point is there', self.undead())
        rule('one row per operation', self.doubled())
        rule('an operation that was acknowledged twice has lost its first run', self.acked_twice())
        rule('no server runs an operation again that it knows', self.run_again())
        rule('every answer names the run whose row is there', self.answers())
        rule('the result of a key is that of its row (K2)', self.results())
        rule('every row is from the ledger', self.strangers())
        rule('tokens of keys grow (L2)', self.tokens('take', 'key'))
        rule('tokens of jobs grow (J11)', self.tokens('fetch', 'job'))
        rule('an old token does nothing (L3, L4, J11)', self.old_tokens())
        rule('no job is completed twice', self.completed_twice())
        rule('every enqueue is followed by a run that sees it (J2)', self.not_run())
        rule('a run has the payload of its own job', self.other_payload())
        rule('every tick is one job (T1)', self.ticks())
        rule('no job is left, dead or cancelled', list(self.left()) + list(self.dead()))
        return self.result
