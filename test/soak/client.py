"""A client of the soak test: draws an action, does it, notes the answers, again.

All choices come from one generator of random numbers that is seeded with seed, number
of the client and generation (how often it was killed and started anew).  What others
do in the meantime is not reproducible.
"""

import base64
import os
import random
import time

import psycopg2

from ledger import QUEUES, note

RC, RR, SER = 'READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE'

# Not a fault: the transaction is rolled back, as every application has to expect.
#	55P03: lock_timeout, 40P01: several keys in one transaction, and DDL beside it
EXPECTED = {'40001', '40P01', '55P03'}
REFUSED = {'ID002', 'ID003'}
LOST = (psycopg2.OperationalError, psycopg2.InterfaceError)


class Rollback(Exception):
    """Ends the transaction as if the application had failed."""


class Client:
    def __init__(self, dsn, seed, slot, generation, log, drain=False):
        self.dsn = dsn
        self.who = '%d.%d' % (slot, generation)
        self.random = random.Random('%s/%d/%d' % (seed, slot, generation))
        self.base = (slot * 1000 + generation) * 1000000
        self.log = log
        self.drain = drain
        self.counter = 0
        self.connection = None
        self.held = []          # leased jobs: dict of queue, key, job_id, token, until, looked
        self.tokens = []        # (job_id, token) that were handed out once
        self.jobs = []          # numbers of the last jobs that an enqueue returned
        self.keys = []          # leased keys: (key, token)
        self.prepared = []      # transactions to be ended

    # -- plumbing ---------------------------------------------------------------

    def connect(self):
        while True:
            try:
                self.connection = psycopg2.connect(self.dsn, application_name='soak ' + self.who)
                self.connection.autocommit = True
                self.cursor = self.connection.cursor()
                self.cursor.execute("SET lock_timeout = '3 s'")
                return
            except psycopg2.Error:
                time.sleep(0.02)

    def tell(self, *words):
        os.write(self.log, (' '.join(map(str, words)) + '\n').encode())

    def sql(self, text, params=None):
        self.cursor.execute(text, params)
        return self.cursor.fetchall() if self.cursor.description else []

    def chance(self, probability):
        return self.random.random() < probability

    def linger(self):
        """Time for others, while this transaction is open."""
        if not self.drain and self.chance(0.3):
            time.sleep(self.random.choice((0.001, 0.003, 0.01, 0.03, 0.1)))

    def note(self, what, call, params, columns, args=None):
        return note(self.cursor, self.who, what, call, params, columns, args)

    def act(self):
        """One action; returns its name."""
        name = self.random.choices(*self.weights())[0]
        self.counter += 1
        try:
            if self.connection is None or self.connection.closed:
                self.connect()
            getattr(self, name)()
            self.tell('did', name)
        except Rollback:
            self.rollback(name, 'wanted')
        except LOST as e:
            if e.pgcode in EXPECTED:
                self.rollback(name, e.pgcode)
            else:
                self.lost(name, e)
        except psycopg2.Error as e:
            if e.pgcode and e.pgcode not in EXPECTED and e.pgcode not in REFUSED | {'ID005'}:
                self.tell('unexpected', name, e.pgcode, str(e).replace('\n', ' '))
            self.rollback(name, e.pgcode)

    def rollback(self, name, why):
        self.tell('rollback', name, why)
        try:
            self.sql('ROLLBACK')
        except psycopg2.Error as e:
            self.lost(name, e)

    def lost(self, name, error):
        code = error.pgcode
        text = str(error).replace('\n', ' ')
        if code and not code.startswith(('57P', '08')):
            self.tell('unexpected', name, code, text)
        self.tell('lost', name, code)
        try:
            self.connection.close()
        except psycopg2.Error:
            pass
        self.connection = None

    def weights(self):
        if self.drain:
            return (['fetch_lease', 'end_held'], [1, 2])
        return (['produce', 'work_in_transaction', 'fetch_lease', 'end_held', 'abandon',
                 'use_old_token', 'cancel', 'retry', 'pause', 'claim', 'lease_key',
                 'use_key_token', 'end_prepared', 'cleanup'],
                [45, 14, 16, 20, 3,
                 6, 1.5, 1.5, 0.3, 5, 4,
                 4, 4, 0.5])

    # -- transactions -----------------------------------------------------------

    def begin(self, level=None):
        level = level or self.random.choice((RC, RC, RC, RR, SER))
        self.sql('BEGIN ISOLATION LEVEL ' + level)

    def end(self):
        """Commit mostly; else roll back, or prepare and end it some time later."""
        self.linger()
        draw = self.random.random()
        if draw < 0.08:
            raise Rollback
        if draw < 0.16:
            gid = 'soak %s %d' % (self.who, self.counter)
            self.sql('PREPARE TRANSACTION %s', (gid,))
            self.prepared.append(gid)
            if self.chance(0.5):
                self.end_prepared()
            return
        self.sql('COMMIT')

    def end_prepared(self):
        if self.prepared:
            gid = self.prepared.pop(self.random.randrange(len(self.prepared)))
            end_prepared(self.cursor, gid)

    def in_savepoint(self, action, *args):
        """Returns what the action returns; rolled back now and then, or if it is refused."""
        self.sql('SAVEPOINT s')
        try:
            result = action(*args)
        except psycopg2.Error as e:
            if e.pgcode not in REFUSED | {'ID004', 'ID005'}:
                raise
            self.sql('ROLLBACK TO SAVEPOINT s')
            self.tell('refused', e.pgcode)
            return e.pgcode
        if self.chance(0.15):
            self.sql('ROLLBACK TO SAVEPOINT s')
            return 'undone'
        self.sql('RELEASE SAVEPOINT s')
        return result

    # -- enqueue ----------------------------------------------------------------

    def number(self):
        self.counter += 1
        return self.base + self.counter

    def payload(self):
        n = self.number()
        size = self.random.choice((0, 0, 0, 0, 0, 300, 1500, 3000, 8000, 20000))
        pad = base64.b64encode(self.random.randbytes(size * 3 // 4)).decode()
        return n, '{"n": %d, "pad": "%s"}' % (n, pad)

    def key(self, queue):
        if queue == 'mixed' and self.chance(0.1):
            return None
        if queue == 'rerun' and self.chance(0.5):
            return 'chain %d' % self.random.randrange(6)
        if self.chance(0.75):
            return 'hot %d' % self.random.randrange(4)
        return 'key %d' % self.random.randrange(40)

    def policy(self, queue, key=None):
        """Arguments of an enqueue, within the discipline of the queue.

        Enqueues of a chain are for later, so that a follow-up may have to wait for longer
        than the job before it that has failed.
        """
        pick = self.random.choice
        args = {}
        if queue == 'exclusive':
            args['dedup'] = pick((None, 'until_executed'))
            args['if_running'] = pick((None, 'skip', 'skip', 'rerun'))
        elif queue == 'rerun':
            args['dedup'] = pick((None, 'until_executed'))
            args['if_running'] = pick((None, 'rerun'))
        elif queue == 'expired':
            args['dedup'] = pick((None, 'until_expired'))
            args['key_ttl'] = pick((None, '500 ms', '4 s'))
        elif queue == 'brief':
            args['dedup'] = pick((None, 'until_executing'))
        else:
            args['dedup'] = pick((None, 'until_executing', 'until_executed', 'until_expired'))
            if args['dedup'] == 'until_expired':
                args['key_ttl'] = pick(('100 ms', '1 s', '10 s'))
            if args['dedup'] == 'until_executed':
                args['if_running'] = pick((None, 'skip', 'rerun'))
        args['on_duplicate'] = pick((None, 'skip', 'skip', 'replace', 'replace', 'debounce', 'error'))
        chain = key is not None and key.startswith('chain')
        if chain or args['on_duplicate'] == 'debounce' or self.chance(0.15):
            self.later(queue, args, (300, 1000, 2000) if chain else (0, 20, 100, 300, 1000))
        args['priority'] = pick((None, None, None, -5, 5))
        if queue in ('exclusive', 'expired', 'mixed'):
            args['max_attempts'] = pick((None, None, 1, 2))
        return {name: value for name, value in args.items() if value is not None}

    def later(self, queue, args, delays):
        delay = '%d ms' % self.random.choice(delays)
        args[self.random.choice(('delay', 'delay', 'run_at'))] = delay
        if args['on_duplicate'] != 'debounce':
            if queue in ('mixed', 'brief'):
                args['include_scheduled'] = self.chance(0.5)
            else:
                args['include_scheduled'] = True

    @staticmethod
    def arguments(args):
        text = ''
        for name in args:
            value = '%%(%s)s' % name
            if name == 'run_at':
                value = 'clock_timestamp() + %s::interval' % value
            text += ', %s => %s' % (name, value)
        return text

    def enqueue(self, queue, key, args):
        n, payload = self.payload()
        if key is None:
            args = {name: args[name] for name in args
                    if name in ('delay', 'run_at', 'priority', 'max_attempts')}
        rows = self.note(
            'enqueue',
            'SELECT * FROM idem_enqueue(%(queue)s, %(payload)s, key => %(key)s'
            + self.arguments(args) + ')',
            dict(args, queue=queue, key=key, payload=payload, n=n),
            {'queue': '%(queue)s', 'key': '%(key)s', 'job_id': 'c.job_id', 'n': '%(n)s',
             'digest': 'md5(%(payload)s::jsonb::text)', 'result': 'md5(c.result::text)',
             'outcome': 'c.outcome'},
            args)
        self.remember_job(rows[0][2])
        self.tell('outcome', queue, rows[0][-1])

    def enqueue_many(self, queue, key, args):
        keys = [key] + [self.key(queue) for _ in range(self.random.randint(1, 5))]
        if None in keys:
            args = {}
        drawn = [self.payload() for _ in keys]
        rows = self.note(
            'enqueue',
            'SELECT * FROM idem_enqueue_many(%(queue)s, %(payloads)s::jsonb[], %(keys)s::text[]'
            + self.arguments(args) + ')',
            dict(args, queue=queue, keys=keys, payloads=[p for _, p in drawn],
                 n=[n for n, _ in drawn]),
            {'queue': '%(queue)s', 'key': '(%(keys)s::text[])[c.ord]', 'job_id': 'c.job_id',
             'n': '(%(n)s)[c.ord]',
             'digest': 'md5(((%(payloads)s::jsonb[])[c.ord])::text)',
             'result': 'md5(c.result::text)', 'outcome': 'c.outcome'},
            args)
        for row in rows:
            self.remember_job(row[2])
            self.tell('outcome', queue, row[-1])

    def remember_job(self, job_id):
        self.jobs.append(job_id)
        del self.jobs[:-50]

    def enqueue_something(self):
        queue = self.random.choices(list(QUEUES), (3, 4, 3, 4, 2))[0]
        key = self.key(queue)
        args = self.policy(queue, key)
        if self.chance(0.1):
            self.enqueue_many(queue, key, args)
        else:
            self.enqueue(queue, key, args)

    def produce(self):
        if self.chance(0.3):
            self.enqueue_something()    # autocommit
            return
        self.begin()
        for _ in range(self.random.choice((1, 1, 1, 1, 2, 3))):
            if self.chance(0.3):
                self.in_savepoint(self.enqueue_something)
            else:
                self.enqueue_something()
        self.end()

    # -- work -------------------------------------------------------------------

    def fetch(self, lease):
        queue = self.random.choice(list(QUEUES))
        batch = self.random.choice((1, 1, 1, 2, 5))
        rows = self.note(
            'fetch',
            'SELECT * FROM idem_fetch(%(queue)s, %(batch)s, %(lease)s::interval, %(who)s)',
            {'queue': queue, 'batch': batch, 'lease': '%d ms' % lease, 'who': self.who},
            {'queue': '%(queue)s', 'key': 'c.key', 'job_id': 'c.job_id', 'token': 'c.token',
             'attempt': 'c.attempt', 'n': "(c.payload ->> 'n')::bigint",
             'digest': 'md5(c.payload::text)'},
            {'lease': lease})
        jobs = [{'queue': row[0], 'key': row[1], 'job_id': row[2], 'token': row[3],
                 'looked': False} for row in rows]
        for job in jobs:
            self.tokens.append((job['job_id'], job['token']))
        del self.tokens[:-60]
        return jobs

    def look(self, job):
        """The work: what does it see?"""
        self.note('look', 'SELECT 1', job,
                  {'job_id': '%(job_id)s', 'token': '%(token)s'})
        job['looked'] = True

    def finish(self, job):
        """Completes, fails, snoozes or renews; returns the answer."""
        draw = 0 if self.drain else self.random.random()
        if job['queue'] == 'rerun' and not self.drain:
            draw = min(draw * 1.4, 0.9)        # more failures, so that follow-ups wait
        params = dict(job, result='{"n": %d}' % self.number())
        columns = {'queue': '%(queue)s', 'key': '%(key)s', 'job_id': '%(job_id)s',
                   'token': '%(token)s', 'outcome': 'c.answer'}
        args = {}
        before = self.sql('SELECT pg_current_snapshot()::text')[0][0]
        if draw < 0.5:
            what = 'complete'
            call = 'SELECT idem_complete(%(job_id)s, %(token)s, %(result)s)::text AS answer'
            columns['result'] = 'md5(%(result)s::jsonb::text)'
        elif draw < 0.65:
            what = 'complete'
            call = ('SELECT status AS answer FROM idem_complete_many'
                    '(ARRAY[%(job_id)s]::bigint[], ARRAY[%(token)s]::bigint[])')
        elif draw < 0.85:
            what = 'fail'
            params['dead'] = self.chance(0.1)
            params['retry_in'] = self.random.choice((None, '0', '100 ms', '700 ms'))
            call = ("SELECT idem_fail(%(job_id)s, %(token)s, 'failed', retry_in => %(retry_in)s,"
                    ' dead => %(dead)s) AS answer')
        elif draw < 0.92:
            what = 'snooze'
            params['delay'] = self.random.choice(('0', '50 ms', '300 ms'))
            call = ("SELECT 'snoozed' AS answer"
                    ' FROM idem_snooze(%(job_id)s, %(token)s, %(delay)s)')
        else:
            what = 'heartbeat'
            params['lease'] = args['lease'] = self.lease()
            call = ('SELECT status AS answer FROM idem_heartbeat'
                    "(ARRAY[%(job_id)s]::bigint[], ARRAY[%(token)s]::bigint[],"
                    " %(lease)s * interval '1 ms')")
        try:
            answer = self.note(what, call, params, columns, args)[0][4]
        except psycopg2.Error as e:
            if e.pgcode in REFUSED:
                job['refused'] = before
            raise
        return what, answer

    def note_refusal(self, job):
        """args.before: the snapshot before the call, for the answer could not be noted with it."""
        if 'refused' in job:
            self.note('refused', 'SELECT 1', job,
                      {'job_id': '%(job_id)s', 'token': '%(token)s'},
                      {'before': job.pop('refused')})

    def work_in_transaction(self):
        self.begin(RC)
        jobs = self.fetch(0)
        if not jobs:
            raise Rollback
        self.linger()
        for job in jobs:
            self.look(job)
            if self.chance(0.1):
                self.in_savepoint(self.enqueue, job['queue'], job['key'],
                                  self.policy(job['queue'], job['key']))
            draw = self.random.random()
            if draw < 0.3:
                self.in_savepoint(self.finish, job)
                self.note_refusal(job)
            elif draw < 0.95:
                self.finish(job)
        self.end()

    def lease(self):
        return self.random.choice((80, 80, 150, 300, 700, 2000))

    def fetch_lease(self):
        if len(self.held) > 12:
            return
        block = not self.drain and self.chance(0.1)
        if block:
            self.begin()
        jobs = self.fetch(2000 if self.drain else self.lease())
        if block:
            self.end()
        self.held += jobs
        if not jobs:
            time.sleep(0.005)

    def end_held(self):
        if not self.held:
            return
        job = self.held.pop(self.random.randrange(len(self.held)))
        if not job['looked']:
            self.look(job)
        self.linger()
        if self.drain or self.chance(0.4):
            what, answer = self.finish_alone(job)
        else:
            self.begin()
            if self.chance(0.2):
                self.enqueue_something()
            result = self.in_savepoint(self.finish, job)
            self.note_refusal(job)
            self.end()
            what, answer = result if isinstance(result, tuple) else (None, result)
        if (what, answer) == ('heartbeat', 'renewed') or answer == 'undone':
            self.held.append(job)

    def finish_alone(self, job):
        """In autocommit."""
        try:
            return self.finish(job)
        except psycopg2.Error as e:
            if e.pgcode not in REFUSED:
                raise
            self.tell('refused', e.pgcode)
            self.note_refusal(job)
            return None, e.pgcode

    def abandon(self):
        """A worker that is never heard of again."""
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))

    def use_old_token(self):
        if self.tokens:
            job_id, token = self.random.choice(self.tokens)
            job = {'queue': None, 'key': None, 'job_id': job_id, 'token': token}
            self.look(job)
            self.tell('old', self.finish_alone(job))

    # -- operators --------------------------------------------------------------

    def cancel(self):
        if self.jobs:
            self.maybe_in_block(
                'cancel', 'SELECT idem_cancel(%(job_id)s)::text AS answer',
                {'job_id': self.random.choice(self.jobs)},
                {'job_id': '%(job_id)s', 'outcome': 'c.answer'})

    def retry(self):
        """Not of the hot keys whose jobs must not run beside each other, for a retry may (J7)."""
        rows = self.sql("SELECT job_id FROM idem.job_status WHERE state IN ('dead', 'cancelled')"
                        " AND (queue NOT IN ('exclusive', 'rerun') OR key LIKE 'key %')"
                        ' ORDER BY job_id DESC LIMIT 20')
        if rows:
            self.maybe_in_block(
                'retry', 'SELECT idem_retry(%(job_id)s)::text AS answer, j.state, j.ended_at'
                ' FROM idem_job(%(job_id)s) AS j',
                {'job_id': self.random.choice(rows)[0]},
                {'job_id': '%(job_id)s', 'outcome': 'c.answer', 'digest': 'c.state',
                 'key': 'c.ended_at::text'})

    def maybe_in_block(self, *args):
        if self.chance(0.5):
            self.tell(args[0], self.note(*args))
            return
        self.begin()
        self.tell(args[0], self.note(*args))
        self.end()

    def pause(self):
        queue = self.random.choice(list(QUEUES))
        self.sql('SELECT idem_pause(%s)', (queue,))
        time.sleep(self.random.choice((0.05, 0.3)))
        self.sql('SELECT idem_resume(%s)', (queue,))

    def cleanup(self):
        self.sql('SELECT idem_cleanup(%s)', (self.random.choice((1, 20, 1000)),))

    # -- keys -------------------------------------------------------------------

    def key_name(self):
        return 'k%d-%d' % (self.counter // 100, self.random.randrange(4))

    def claim(self):
        """A plain claim: finished, released, or left as it is."""
        self.begin()
        key = self.key_name()
        if self.chance(0.3):
            self.in_savepoint(self.claim_and_go_on, key)
        else:
            self.claim_and_go_on(key)
        self.end()

    def claim_and_go_on(self, key):
        status = self.note(
            'claim', "SELECT * FROM idem_claim(%(key)s, ttl => '1 hour', wait => %(wait)s)",
            {'key': key, 'wait': self.random.choice((None, '0', '50 ms'))},
            {'key': '%(key)s', 'outcome': 'c.status', 'digest': 'c.result::text'})[0][1]
        if status != 'claimed':
            return
        self.linger()
        draw = self.random.random()
        if draw < 0.6:
            self.note('finish plain', 'SELECT idem_finish(%(key)s, %(result)s)::text',
                      {'key': key, 'result': str(self.number())},
                      {'key': '%(key)s', 'digest': '%(result)s'})
        elif draw < 0.8:
            self.note('release plain', 'SELECT idem_release(%(key)s)::text', {'key': key},
                      {'key': '%(key)s'})

    def lease_key(self):
        key, lease = self.key_name(), self.lease()
        row = self.note(
            'lease', "SELECT * FROM idem_lease(%(key)s, %(lease)s * interval '1 ms',"
            " ttl => '1 hour', wait => %(wait)s)",
            {'key': key, 'lease': lease, 'wait': self.random.choice((None, '0'))},
            {'key': '%(key)s', 'outcome': 'c.status', 'token': 'c.token',
             'attempt': 'c.attempt', 'digest': 'c.result::text'},
            {'lease': lease})[0]
        if row[1] == 'claimed':
            self.keys.append((key, row[2]))
            del self.keys[:-8]

    def use_key_token(self):
        if not self.keys:
            return
        key, token = self.random.choice(self.keys)
        params = {'key': key, 'token': token, 'lease': self.lease(),
                  'result': str(self.number())}
        what = self.random.choice(('finish', 'finish', 'release', 'renew', 'checkpoint', 'fence'))
        call = {'finish': 'idem_finish(%(key)s, %(result)s, token => %(token)s)',
                'release': 'idem_release(%(key)s, token => %(token)s)',
                'renew': "idem_renew(%(key)s, %(token)s, %(lease)s * interval '1 ms')",
                'checkpoint': "idem_checkpoint(%(key)s, %(token)s, %(result)s)",
                'fence': 'idem_fence(%(key)s, %(token)s)'}[what]

        self.begin()
        self.in_savepoint(lambda: self.note(
            what + ' lease', 'SELECT ' + call + '::text AS answer', params,
            {'key': '%(key)s', 'token': '%(token)s', 'digest': '%(result)s',
             'outcome': 'c.answer'},
            {'lease': params['lease']}))
        self.end()


def end_prepared(cursor, gid):
    """Ends a prepared transaction; its name decides how.  Another client may have ended it before."""
    verb = 'ROLLBACK' if random.Random(gid).random() < 0.2 else 'COMMIT'
    try:
        cursor.execute(verb + ' PREPARED %s', (gid,))
    except psycopg2.Error as e:
        if e.pgcode not in ('42704', '55000', '55006', '57014'):
            raise
