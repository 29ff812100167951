"""Compares what clients were told (client.py) with what the last primary has, row by row.

	check.py CONNSTR COMMITS FORKS SYNC LOG...

COMMITS: the commits of all servers that were given up: lines of timeline, transaction id, LSN.
FORKS: where the last primary has left earlier timelines: lines of timeline, LSN.  A commit behind
the fork of its timeline is lost with its server; this is what replication itself loses.
SYNC: timelines that used synchronous replication, separated by commas.

Prints one line for each rule, ok or FAILED, and lines `timeline ID ACKNOWLEDGED LOST TWICE`.
"""

import sys
from collections import Counter, defaultdict, namedtuple

import psycopg2

Ack = namedtuple('Ack', 'what kind key at token since until')
TABLE = {'run': 'effects', 'seen': 'effects', 'grant': 'grants', 'enqueue': 'enqueues'}
SHOWN = 10


def lsn(text):
    high, low = text.split('/')
    return (int(high, 16) << 32) + int(low, 16)


def words(path):
    with open(path) as file:
        return [line.split() for line in file]


class Check:
    def __init__(self, dsn, commits, forks, sync, *logs):
        self.commits = {tli + ' ' + xid: lsn(at) for tli, xid, at in words(commits)}
        self.forks = {tli: lsn(at) for tli, at in words(forks)}
        self.sync = set(sync.split(','))
        self.acks, self.others = [], Counter()
        for log in logs:
            self.read(log)
        self.acks.sort(key=lambda ack: ack.until)
        connection = psycopg2.connect(dsn)
        self.cursor = connection.cursor()
        self.last = self.rows('SELECT left(here(), 8)')[0][0]
        self.survivors = {name: set(self.rows(query)) for name, query in {
            'effects': 'SELECT kind, key, at FROM effects',
            'grants': 'SELECT kind, key, at FROM grants',
            'enqueues': "SELECT queue, key, at FROM enqueues UNION ALL SELECT 'stream', key, at FROM changes",
        }.items()}

    def read(self, log):
        with open(log) as file:
            for line in file:
                fields = line.rstrip('\n').split('\t')
                if fields[0] in TABLE:
                    what, kind, key, at, token, since, until = fields
                    self.acks.append(Ack(what, kind, key, at, int(token), float(since), float(until)))
                else:
                    self.others[' '.join(fields[:1] + fields[3:4])] += 1

    def rows(self, query):
        self.cursor.execute(query)
        return self.cursor.fetchall()

    def is_kept(self, ack):
        """By its place in the WAL: does the last primary descend from this commit?"""
        tli = ack.at.split()[0]
        if tli == self.last:
            return True
        return ack.at in self.commits and tli in self.forks and self.commits[ack.at] < self.forks[tli]

    def rule(self, text, bad):
        bad = list(bad)
        print('FAILED' if bad else 'ok    ', text)
        for what in bad[:SHOWN]:
            print('      ', what)
        if len(bad) > SHOWN:
            print('       and %d more' % (len(bad) - SHOWN))

    # -- rules ---------------------------------------------------------------

    def check_rows(self):
        self.rule('every acknowledged commit is in the WAL of its server',
                  (a for a in self.acks if a.at.split()[0] != self.last and a.at not in self.commits))
        kept = {a: self.is_kept(a) for a in self.acks}
        there = {a: (a.kind, a.key, a.at) in self.survivors[TABLE[a.what]] for a in self.acks}
        told = [a for a in self.acks if a.what != 'seen']
        seen = [a for a in self.acks if a.what == 'seen']
        self.rule('K2, J7: every acknowledged commit before the fork of its timeline has its row',
                  (a for a in told if kept[a] and not there[a]))
        self.rule('K1: none behind the fork has one', (a for a in told if there[a] and not kept[a]))
        self.rule('K2: every replay named a commit; its row is there, or it lies behind the fork',
                  (a for a in seen if there[a] != kept[a]))
        self.lost = [a for a in self.acks if not kept[a]]
        self.rule('synchronous: no acknowledged commit is lost, and no replay names a lost one',
                  (a for a in self.lost if a.at.split()[0] in self.sync))

    def check_doubled(self):
        self.rule('K3, J7: no work is doubled on the last primary',
                  self.rows('SELECT kind, key, count(*) FROM effects GROUP BY 1, 2 HAVING count(*) > 1'))
        runs = defaultdict(set)
        for a in self.acks:
            if a.what == 'run':
                runs[a.kind, a.key].add(a)
        self.twice = {key: sorted(acks, key=lambda a: a.until) for key, acks in runs.items() if len(acks) > 1}
        self.rule('K3: of work that was acknowledged twice, all but one commit lie behind the fork',
                  (acks for acks in self.twice.values() if sum(map(self.is_kept, acks)) > 1))
        self.rule('synchronous: no work is acknowledged twice',
                  (acks for acks in self.twice.values()
                   if any(a.at.split()[0] in self.sync for a in acks[:-1])))

    def check_lost(self):
        self.rule('K2: every effect of a key is the result of the key',
                  self.rows("""
                      SELECT e.kind, e.key, e.at, g.status, g.result FROM effects AS e
                        LEFT JOIN LATERAL idem_get(e.kind || ' ' || e.key) AS g ON true
                       WHERE e.kind IN ('claim', 'call', 'lease') AND g.result #>> '{}' IS DISTINCT FROM e.at"""))
        self.rule('K1: every finished key has its effect',
                  self.rows("""
                      SELECT key FROM idem.key_status WHERE status = 'finished' AND key ~ '^(claim|call|lease) '
                      EXCEPT SELECT kind || ' ' || key FROM effects"""))
        self.rule('J7: every job that was enqueued has run',
                  self.rows("SELECT key FROM enqueues EXCEPT SELECT key FROM effects WHERE kind = 'once'"))
        self.rule('J2: every change was seen by a job',
                  self.rows('SELECT key, at FROM changes WHERE job_id IS NULL'))
        self.rule('J7: no job is left', self.rows('SELECT queue, job_id FROM idem.jobs'))

    def check_tokens(self):
        grants = defaultdict(list)
        for a in self.acks:
            if a.what == 'grant':
                grants[a.kind, a.key].append(a)
        self.rule('L2: a token that was granted later is higher',
                  ((a, b) for group in grants.values() for a in group for b in group
                   if a.until < b.since and a.token >= b.token))
        self.rule('L2: no token is granted twice',
                  ((key, token) for key, group in grants.items()
                   for token, n in Counter(a.token for a in group).items() if n > 1))
        self.rule('L3: no work was done with a token that was not the last one',
                  self.rows("""
                      SELECT e.key, e.token, g.token FROM effects AS e JOIN grants AS g USING (kind, key)
                       WHERE e.kind = 'lease' AND g.token > e.token"""))

    def summary(self):
        acked, lost, twice = Counter(), Counter(), Counter()
        for a in self.acks:
            acked[a.at.split()[0]] += a.what != 'seen'
        for a in self.lost:
            lost[a.at.split()[0]] += a.what != 'seen'
        for acks in self.twice.values():
            for a in acks[:-1]:
                twice[a.at.split()[0]] += 1
        for tli in sorted(acked):
            print('timeline %s %d %d %d' % (tli, acked[tli], lost[tli], twice[tli]))
        kinds = Counter('%s %s' % (a.what, a.kind) for a in self.acks)
        print('acknowledged:', ', '.join('%s: %d' % pair for pair in sorted(kinds.items())))
        print('other answers:', ', '.join('%s: %d' % pair for pair in sorted(self.others.items())))

    def run(self):
        self.check_rows()
        self.check_doubled()
        self.check_lost()
        self.check_tokens()
        self.summary()


Check(*sys.argv[1:]).run()
