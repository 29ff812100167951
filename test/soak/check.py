"""The checker: reads the ledger and knows the contract, nothing else.

Every rule is one check.  A violation is printed with the story of the job or key: its
lines of the ledger in their order.
"""

import collections
import datetime
import glob
import os

import psycopg2

from ledger import QUEUES

STORY = 60          # lines of a story at most
SHOWN = 3           # violations of a rule that are shown


class Row:
    """A row of the ledger."""

    def __init__(self, values):
        (self.ord, self.xid, snap, self.t0, self.t1, self.who, self.what, self.queue, self.key,
         self.job_id, self.token, self.attempt, self.n, self.digest, self.result, self.outcome,
         self.args) = values
        xmin, xmax, running = self.args.get('before', snap).split(':')
        self.snap = int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(','))))
        self.xid = int(self.xid)

    def sees(self, other):
        """Whether other, which has committed, is in the snapshot of this row."""
        if other.xid == self.xid:
            return other.ord < self.ord
        xmin, xmax, running = self.snap
        return other.xid < xmin or (other.xid < xmax and other.xid not in running)

    def __str__(self):
        args = ' '.join('%s=%s' % item for item in self.args.items() if item[0] != 'before')
        fields = [(name, getattr(self, name)) for name in
                  ('queue', 'key', 'job_id', 'token', 'attempt', 'n', 'outcome')]
        return '%8d %s xid %d %s %s: %s %s' % (
            self.ord, self.t1.strftime('%H:%M:%S.%f'), self.xid, self.who, self.what,
            ' '.join('%s=%s' % field for field in fields if field[1] is not None), args)


class Life:
    """A job from its enqueue, or retry, to its end."""

    def __init__(self, begin):
        self.begin = begin
        self.rows = []
        self.ends = []          # ends that the ledger has
        self.died = None        # when a life ended that the ledger has no end of
        self.retried = None

    @property
    def end(self):
        return self.ends[0] if self.ends else None

    def ended_before(self, row):
        """Whether the life was over when the call of row had returned."""
        if self.end:
            return self.end.ord < row.ord
        return self.died is not None and self.died <= row.t1

    def fetches(self):
        return [row for row in self.rows if row.what == 'fetch']


class Job:
    def __init__(self, job_id, rows):
        self.job_id = job_id
        self.rows = rows
        self.lives = []
        self.created = next((row for row in rows if row.what == 'enqueue'), None)
        self.queue = self.created.queue if self.created else None
        self.key = self.created.key if self.created else None
        for row in rows:
            if not self.lives or (row.what == 'retry' and row.outcome == 'true'):
                if self.lives:
                    self.lives[-1].retried = row
                self.lives.append(Life(row))
            life = self.lives[-1]
            life.rows.append(row)
            if is_end(row):
                life.ends.append(row)

    @property
    def retried(self):
        return len(self.lives) > 1

    @property
    def max_attempts(self):
        return self.created.args.get('max_attempts', QUEUES[self.queue]['max_attempts'])

    def life_of(self, row):
        return next(life for life in reversed(self.lives) if life.begin.ord <= row.ord)


def is_end(row):
    return ((row.what == 'complete' and accepted(row))
            or (row.what == 'fail' and row.outcome == 'dead')
            or (row.what == 'cancel' and row.outcome == 'true'))


def accepted(row):
    """Whether the token of a complete, fail, snooze or heartbeat was taken."""
    return row.outcome not in ('stale', 'not_held', 'false')


USES = ('complete', 'fail', 'snooze', 'heartbeat')
WRITES_PAYLOAD = ('enqueued', 'replaced', 'postponed', 'rerun')


def interval(text):
    number, unit = text.split()
    return datetime.timedelta(milliseconds=float(number) * {'ms': 1, 's': 1000}[unit])


def milliseconds(row):
    return datetime.timedelta(milliseconds=row.args['lease'])


class Ledger:
    def __init__(self, connection):
        with connection.cursor() as cursor:
            cursor.execute('SELECT ord, xid::text, snap::text, t0, t1, who, what, queue, key, job_id,'
                           ' token, attempt, n, digest, result, outcome, args'
                           ' FROM soak.ledger ORDER BY ord')
            self.rows = [Row(values) for values in cursor]
            cursor.execute('SELECT job_id, state, ended_at FROM idem.job_log')
            self.log = {values[0]: values[1:] for values in cursor}
            cursor.execute('SELECT job_id, queue, key, attempt, max_attempts, run_at, lease_until,'
                           ' after_job FROM idem.jobs ORDER BY job_id')
            self.left = {values[0]: values for values in cursor}
            cursor.execute('SELECT clock_timestamp()')
            self.now = cursor.fetchone()[0]
        by_job = collections.defaultdict(list)
        for row in self.rows:
            if row.job_id is not None:
                by_job[row.job_id].append(row)
        self.jobs = {job_id: Job(job_id, rows) for job_id, rows in by_job.items()}
        for job in self.jobs.values():
            self.find_deaths(job)
        self.by_key = collections.defaultdict(list)
        for job in self.jobs.values():
            if job.created and job.key is not None:
                self.by_key[job.queue, job.key].append(job)

    def find_deaths(self, job):
        """Lives that ended without us: the last lease ran out."""
        for life in job.lives:
            if life.ends:
                continue
            if life.retried:
                life.died = datetime.datetime.fromisoformat(life.retried.key + ':00'
                                                            if life.retried.key[-3] in '+-'
                                                            else life.retried.key)
            elif self.log.get(job.job_id, ('',))[0] == 'dead':
                life.died = self.log[job.job_id][1]

    def enqueues_of(self, job):
        """Enqueues that returned this job."""
        return [row for row in job.rows if row.what == 'enqueue']


class Checker:
    def __init__(self, ledger):
        self.ledger = ledger
        self.failed = 0
        self.passed = 0

    def story(self, rows):
        if len(rows) > STORY:
            print('        … %d lines before' % (len(rows) - STORY))
        for row in rows[-STORY:]:
            print('   ', row)

    def rule(self, name, violations):
        violations = list(violations)
        if not violations:
            self.passed += 1
            print('ok      ' + name)
            return
        self.failed += 1
        print('FAILED  %s: %d violations' % (name, len(violations)))
        for text, rows in violations[:SHOWN]:
            print('  - ' + text)
            self.story(rows)

    def jobs_of(self, *queues):
        return [jobs for (queue, _), jobs in self.ledger.by_key.items() if queue in queues]

    @staticmethod
    def all_rows(jobs):
        return sorted((row for job in jobs for row in job.rows), key=lambda row: row.ord)

    # -- every job ends once ----------------------------------------------------

    def ends_once(self):
        ledger = self.ledger
        for job in ledger.jobs.values():
            for life in job.lives:
                if len(life.ends) > 1:
                    yield 'job %d ended %d times' % (job.job_id, len(life.ends)), job.rows
                elif job.created and not (life.ends or life.died or job.job_id in ledger.left):
                    yield 'job %d is gone and never ended' % job.job_id, job.rows
            last = job.lives[-1]
            kept = ledger.log.get(job.job_id)
            if last.end and kept and kept[0] != self.state(last.end):
                yield 'job %d is %s in the history' % (job.job_id, kept[0]), job.rows
            if last.end and job.job_id in ledger.left:
                yield 'job %d has ended and is there' % job.job_id, job.rows

    @staticmethod
    def state(end):
        return {'complete': 'done', 'fail': 'dead', 'cancel': 'cancelled'}[end.what]

    def none_left(self):
        for job_id, values in self.ledger.left.items():
            job = self.ledger.jobs.get(job_id)
            yield 'job %d waits still: %s' % (job_id, values), job.rows if job else []

    def all_known(self):
        for job_id in set(self.ledger.log) | set(self.ledger.left):
            if job_id not in self.ledger.jobs or not self.ledger.jobs[job_id].created:
                yield 'no enqueue returned job %d' % job_id, []
        for job in self.ledger.jobs.values():
            if job.created and job.created.outcome not in ('enqueued', 'rerun'):
                yield 'job %d: the first answer is %s' % (job.job_id, job.created.outcome), job.rows
            if not job.created and any(row.what == 'fetch' for row in job.rows):
                yield 'job %d was fetched, but no enqueue returned it' % job.job_id, job.rows

    def died_of_attempts(self):
        """A life that ended by itself has used its attempts."""
        for job in self.ledger.jobs.values():
            for life in job.lives:
                if life.died and job.created:
                    fetches = life.fetches()
                    if not fetches or fetches[-1].attempt < job.max_attempts:
                        yield 'job %d is dead and had attempts left' % job.job_id, job.rows

    # -- promises ---------------------------------------------------------------

    def strong(self, row):
        """Only a job that waits gives this answer: a run that sees the enqueue will follow."""
        if row.outcome == 'absorbed':
            dedup = row.args.get('dedup', QUEUES[row.queue].get('dedup', 'until_executing'))
            running = row.args.get('if_running', QUEUES[row.queue].get('if_running', 'skip'))
            return dedup == 'until_executing' or (dedup == 'until_executed' and running == 'rerun')
        return row.outcome != 'done'

    def runs_after(self):
        for job in self.ledger.jobs.values():
            for row in self.ledger.enqueues_of(job):
                if self.strong(row):
                    why = self.lost(job, row)
                    if why:
                        yield 'enqueue %d, job %d: %s' % (row.ord, job.job_id, why), job.rows

    def lost(self, job, row):
        life = job.life_of(row)
        end = life.end
        if end and end.what == 'complete':
            look = self.look_of(life, end)
            if end.ord < row.ord:
                return 'returned a job that was done'
            if look is None:
                return 'no look at the data'
            if not look.sees(row):
                return 'the run that completed has not seen it'
        elif end and end.what == 'cancel':
            if end.ord < row.ord:
                return 'returned a job that was cancelled'
        elif end or life.died:
            if not any(fetch.ord > row.ord for fetch in life.fetches()):
                return 'the job is dead and was not fetched after it'
        return None

    @staticmethod
    def look_of(life, complete):
        looks = [row for row in life.rows if row.what == 'look' and row.token == complete.token
                 and row.ord < complete.ord]
        return looks[-1] if looks else None

    def absorbed_while_running(self):
        """Weaker: the job may have run already, but not have ended, nor be beyond hope."""
        for job in self.ledger.jobs.values():
            for row in self.ledger.enqueues_of(job):
                if row.outcome == 'absorbed' and not self.strong(row):
                    why = self.too_late(job, row)
                    if why:
                        yield 'enqueue %d, job %d: %s' % (row.ord, job.job_id, why), job.rows

    def too_late(self, job, row):
        life = job.life_of(row)
        if life.end and row.sees(life.end):
            return 'returned a job that had ended'
        if life.died and life.died < row.t0:
            return 'returned a job that was dead'
        if self.state(life.end) == 'dead' if life.end else life.died:
            fetches = life.fetches()
            if any(fetch.ord > row.ord for fetch in fetches):
                return None
            if fetches and fetches[-1].attempt >= job.max_attempts and self.over(life, fetches[-1], row):
                return 'returned a job whose last lease had run out, and which is dead now'
        return None

    @staticmethod
    def over(life, fetch, row):
        """Whether the lease of this fetch had certainly run out when row was asked for."""
        if fetch.xid == row.xid or not row.sees(fetch):
            return False        # it runs in a transaction
        until = fetch.t1 + milliseconds(fetch)
        for beat in life.rows:
            if beat.what == 'heartbeat' and beat.token == fetch.token and accepted(beat):
                until = max(until, beat.t1 + milliseconds(beat))
        return until < row.t0

    # -- tokens -----------------------------------------------------------------

    def tokens(self):
        for job in self.ledger.jobs.values():
            last = 0
            valid = None
            for row in job.rows:
                if row.what == 'fetch':
                    if row.token <= last:
                        yield 'job %d: tokens do not grow' % job.job_id, job.rows
                    last = valid = row.token
                elif row.what in USES and accepted(row):
                    if row.token != valid:
                        yield ('job %d: %s %d with an old token was accepted'
                               % (job.job_id, row.what, row.ord), job.rows)
                    if row.what != 'heartbeat':
                        valid = None
                elif row.what in ('cancel', 'retry') and row.outcome == 'true':
                    valid = None

    def refusals(self):
        """The last token is not refused while the job is there."""
        for job in self.ledger.jobs.values():
            for row in job.rows:
                if row.what == 'refused' or (row.what in USES and not accepted(row)):
                    if not self.token_over(job, row):
                        yield 'job %d: a valid token was refused' % job.job_id, job.rows

    @staticmethod
    def token_over(job, row):
        fetch = next((f for f in job.rows if f.what == 'fetch' and f.token == row.token), None)
        if fetch is None or not row.sees(fetch):
            return True         # rolled back, or not committed yet
        for other in job.rows:
            if other.t0 > row.t1 or other.ord < fetch.ord or other is row:
                continue
            if (other.what == 'fetch' and other.token > row.token) or is_end(other):
                return True
            if other.what in ('fail', 'snooze') and accepted(other):
                return True
        return any(life.died and life.died <= row.t1 and fetch in life.rows for life in job.lives)

    def attempts(self):
        for job in self.ledger.jobs.values():
            for life in job.lives:
                count = 0
                for row in life.rows:
                    if row.what == 'fetch':
                        count += 1
                        if row.attempt != count:
                            yield 'job %d: attempt %d is %d' % (job.job_id, count, row.attempt), job.rows
                            break
                        if job.created and count > job.max_attempts:
                            yield 'job %d: too many attempts' % job.job_id, job.rows
                            break
                    elif row.what == 'snooze':
                        count -= 1

    # -- payloads ---------------------------------------------------------------

    def payloads(self):
        """A fetch gets the newest payload that was committed for the job."""
        for job in self.ledger.jobs.values():
            newest = None
            for row in job.rows:
                if row.what == 'enqueue' and row.outcome in WRITES_PAYLOAD:
                    newest = row
                elif row.what == 'fetch' and newest and (row.n, row.digest) != (newest.n, newest.digest):
                    yield ('job %d: fetch %d has the payload %s, not %s'
                           % (job.job_id, row.ord, row.n, newest.n)), job.rows

    def newest_last(self):
        """Runs of a key, one after the other, never go back to an older payload."""
        for jobs in self.jobs_of('rerun'):
            if any(job.retried for job in jobs):
                continue
            written = {row.n: row.ord for job in jobs for row in self.ledger.enqueues_of(job)}
            before = None
            for row in self.all_rows(jobs):
                if row.what != 'fetch':
                    continue
                if before and written.get(row.n, 0) < written.get(before.n, 0):
                    yield ('key %s: job %d runs with an older payload than job %d before'
                           % (row.key, row.job_id, before.job_id),
                           self.all_rows(job for job in jobs
                                         if job.job_id in (row.job_id, before.job_id)))
                before = row

    # -- strategies -------------------------------------------------------------

    def no_overlap(self):
        """until_executed: no job of a key begins before the one that began is gone."""
        for jobs in self.jobs_of('exclusive', 'rerun'):
            if any(job.retried for job in jobs):
                continue
            started = []
            for row in self.all_rows(jobs):
                if row.what == 'fetch':
                    job = self.ledger.jobs[row.job_id]
                    for other in started:
                        if other is not job and not other.lives[0].ended_before(row):
                            yield ('key %s: job %d was fetched while job %d was running'
                                   % (row.key, job.job_id, other.job_id),
                                   self.all_rows((job, other)))
                    started = [o for o in started if not o.lives[0].ended_before(row)]
                    if job not in started:
                        started.append(job)

    def one_follow_up(self):
        """until_executed: besides the job that runs there is one follow-up at most."""
        for jobs in self.jobs_of('exclusive', 'rerun'):
            if any(job.retried for job in jobs):
                continue
            live = []
            for job in sorted(jobs, key=lambda job: job.created.ord):
                live = [o for o in live if not o.lives[0].ended_before(job.created)]
                if live and job.created.outcome == 'enqueued':
                    yield ('key %s: job %d was enqueued although job %d is there'
                           % (job.key, job.job_id, live[0].job_id),
                           self.all_rows([job] + live))
                live.append(job)
                if len(live) > 2:
                    yield ('key %s: %d jobs at once' % (job.key, len(live)), self.all_rows(live))

    def once_per_ttl(self):
        """until_expired: no second job before the ttl, unless the first did not happen."""
        for jobs in self.jobs_of('expired'):
            jobs.sort(key=lambda job: job.created.ord)
            for i, job in enumerate(jobs):
                for other in jobs[:i]:
                    ttl = interval(other.created.args.get('key_ttl', QUEUES['expired']['key_ttl']))
                    if job.created.t1 < other.created.t0 + ttl and self.in_the_way(other, job.created):
                        yield ('key %s: job %d was enqueued %s after job %d'
                               % (job.key, job.job_id, job.created.t1 - other.created.t0, other.job_id),
                               self.all_rows((job, other)))

    @staticmethod
    def in_the_way(job, row):
        life = job.life_of(row)
        if life.begin.what == 'retry' and not row.sees(life.begin):
            return False        # it came back meanwhile, and a retry does not look (J7)
        if life.end and life.end.what == 'complete':
            return True
        return not life.ended_before(row)

    def done_answers(self):
        for job in self.ledger.jobs.values():
            for row in self.ledger.enqueues_of(job):
                if row.outcome == 'done':
                    end = job.life_of(row).end
                    if not end or end.what != 'complete' or end.result != row.result:
                        yield 'enqueue %d: job %d is not done so' % (row.ord, job.job_id), job.rows

    # -- keys -------------------------------------------------------------------

    def keys(self):
        by_key = collections.defaultdict(list)
        for row in self.ledger.rows:
            if row.job_id is None and row.key is not None:
                by_key[row.key].append(row)
        for key, rows in by_key.items():
            if rows[0].queue is None:
                why = KeyStory(rows).run()
                if why:
                    yield 'key %s: %s' % (key, why), rows

    # -- clients ----------------------------------------------------------------

    def unexpected(self, log):
        for name, line in client_logs(log):
            if line.startswith('unexpected'):
                yield '%s: %s' % (name, line), []


def unsound(connection):
    """Tables and indexes, by amcheck."""
    with connection.cursor() as cursor:
        cursor.execute('CREATE EXTENSION IF NOT EXISTS amcheck')
        cursor.execute("SELECT indexrelid::regclass::text FROM pg_index"
                       ' JOIN pg_class ON pg_class.oid = indrelid'
                       " WHERE relnamespace = 'idem'::regnamespace AND indisvalid")
        for (index,) in cursor.fetchall():
            try:
                cursor.execute('SELECT bt_index_check(%s::regclass, true)', (index,))
            except psycopg2.Error as e:
                yield '%s: %s' % (index, e), []
        cursor.execute("SELECT oid::regclass::text, (verify_heapam(oid)).msg FROM pg_class"
                       " WHERE relnamespace = 'idem'::regnamespace AND relkind = 'r'")
        for values in cursor.fetchall():
            yield '%s: %s' % values, []


class KeyStory:
    """One key through its life: at most one run counts, and old tokens do nothing."""

    def __init__(self, rows):
        self.rows = rows
        self.final = None       # the row that ended it
        self.result = None
        self.token = None       # of the lease that is on
        self.until = None       # it is live before that, certainly
        self.last_token = 0
        self.attempt = 0
        self.before = None      # what a plain claim has taken over

    def run(self):
        for row in self.rows:
            why = self.step(row)
            if why:
                return '%s (line %d)' % (why, row.ord)
        return None

    def taken(self, row):
        if self.final:
            return 'runs again'
        if self.until and row.t1 < self.until:
            return 'a live lease was taken over'
        return None

    def step(self, row):
        if row.outcome == 'claimed' and row.what == 'claim':
            why = self.taken(row)
            self.before = (self.token, self.until)
            self.token = self.until = None
            self.final = row
            return why
        if row.what == 'finish plain':
            if self.final is None or self.final.xid != row.xid:
                return 'finished by another one'
            self.result = row.digest
        elif row.what == 'release plain':
            if self.final is None or self.final.xid != row.xid:
                return 'released by another one'
            self.final = None
            self.token, self.until = self.before
        elif row.what == 'lease' and row.outcome == 'claimed':
            return self.taken(row) or self.lease(row)
        elif row.what.endswith(' lease'):
            return self.use(row)
        elif row.outcome == 'finished' and self.final and row.sees(self.final):
            if row.digest != self.result:
                return 'returned another result'
        return None

    def lease(self, row):
        if row.token <= self.last_token:
            return 'tokens do not grow'
        self.attempt += 1
        if row.attempt != self.attempt:
            return 'attempt %d is %d' % (self.attempt, row.attempt)
        self.token = self.last_token = row.token
        self.until = row.t0 + milliseconds(row)
        return None

    def use(self, row):
        if row.token != self.token or self.final:
            return 'an old token was accepted'
        if row.what == 'finish lease':
            self.final = row
            self.result = row.digest
        elif row.what == 'release lease':
            self.token = self.until = None
        elif row.what == 'renew lease':
            self.until = row.t0 + milliseconds(row)
        elif row.what == 'checkpoint lease':
            self.until = None   # runs on as long as it was last given
        return None


def client_logs(log):
    for name in sorted(glob.glob(os.path.join(log, 'client-*.log'))):
        with open(name, encoding='utf-8', errors='replace') as lines:
            for line in lines:
                yield os.path.basename(name), line.strip()


def print_counts(number):
    for name in sorted(number):
        print('  %6d %s' % (number[name], name))


def counts(ledger, log):
    print('clients:')
    print_counts(collections.Counter(line for _, line in client_logs(log)
                                     if line.startswith(('did ', 'rollback ', 'lost ', 'refused '))))
    number = collections.Counter()
    for row in ledger.rows:
        name = row.what
        if row.what == 'enqueue':
            name = '%s %s' % (row.queue, row.outcome)
        elif row.outcome is not None and row.what not in ('renew lease', 'checkpoint lease', 'complete'):
            name = '%s %s' % (row.what, row.outcome)
        elif row.what == 'complete':
            name = 'complete ' + ('accepted' if accepted(row) else row.outcome)
        number[name] += 1
    dead = sum(1 for job in ledger.jobs.values() for life in job.lives if life.died)
    print('ledger: %d jobs, %d dead by their last lease' % (len(ledger.jobs), dead))
    print_counts(number)


def check(connection, log):
    """Prints what was found; true if all rules hold."""
    ledger = Ledger(connection)
    checker = Checker(ledger)
    rule = checker.rule
    with open(os.path.join(log, 'ledger.txt'), 'w', encoding='utf-8') as out:
        out.writelines('%s\n' % row for row in ledger.rows)
    counts(ledger, log)
    rule('no error but those that an application has to expect', checker.unexpected(log))
    rule('all jobs come to an end', checker.none_left())
    rule('every job was enqueued by a transaction that committed', checker.all_known())
    rule('every job ends exactly once (J7, J11)', checker.ends_once())
    rule('a job is dead only without attempts (J11)', checker.died_of_attempts())
    rule('every enqueue is followed by a run that sees it (J2)', checker.runs_after())
    rule('no enqueue is absorbed by a job that will not run (J2, J4, J5)',
         checker.absorbed_while_running())
    rule('an old token does nothing, tokens grow (J11)', checker.tokens())
    rule('the last token works (J11)', checker.refusals())
    rule('attempts are counted', checker.attempts())
    rule('a run has the newest payload of its job (J1, J4)', checker.payloads())
    rule('payloads of reruns never go back, the newest is the last (J4)', checker.newest_last())
    rule('no two jobs of a key run at a time under until_executed (J4)', checker.no_overlap())
    rule('there is one follow-up at most (J4)', checker.one_follow_up())
    rule('once per ttl under until_expired (J5)', checker.once_per_ttl())
    rule('done comes with the result of the job (J5)', checker.done_answers())
    rule('keys: one run, no live lease is taken over, old tokens do nothing (K3, L1 to L3)',
         checker.keys())
    rule('tables and indexes are sound', unsound(connection))
    print('%d passed, %d failed' % (checker.passed, checker.failed))
    return checker.failed == 0
