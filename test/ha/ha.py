"""Failovers under load: rounds of faults, a check after each, tables at the end.

See README.md.  test/ha/run starts this program with a private installation that has idem.
"""

import argparse
import collections
import os
import random
import signal
import statistics
import sys
import time
import traceback

import psycopg2

from check import Checker
from client import SCHEMA, Load
from cluster import NODES, Cluster, Stuck, send
from ledger import Ledger

# ttl >= loop_wait + 2 * retry_timeout, as the manual of Patroni asks
TIMINGS = {'ttl': 5, 'loop_wait': 1, 'retry_timeout': 2}


class Interrupted(BaseException):
    pass


class Faults:
    """Each method breaks something and returns when another server can be the leader."""

    NAMES = ('switchover', 'kill', 'frozen', 'machine', 'standby', 'etcd')

    def __init__(self, cluster, ledger, load, rng, split):
        self.cluster = cluster
        self.ledger = ledger
        self.load = load
        self.rng = rng
        self.split = split
        self.note = ''

    def new_leader(self, old, seconds=60):
        return self.cluster.wait('a leader other than ' + old, seconds, lambda: self.cluster.leader(but=old))

    def run(self, name, old):
        self.note = ''
        getattr(self, name)(old)

    def hold_back(self, old):
        """The standbys get nothing more, while the clients go on."""
        for pid in self.cluster.walsenders(old):
            send(pid, signal.SIGSTOP)
        time.sleep(0.2 + self.rng.random() * 0.8)

    def switchover(self, old):
        body = {'leader': old}
        if not self.cluster.sync:
            body['candidate'] = self.rng.choice([node for node in NODES if node != old])

        def asked():
            status, text = self.cluster.rest(old, 'POST', '/switchover', body, timeout=30)
            if status not in (200, 202):
                self.note = ' (refused first: %s)' % text.strip()[:60]
            return status in (200, 202) or self.cluster.leader(but=old)

        self.cluster.wait('the switchover', 60, asked, 0.5)
        self.new_leader(old)

    def kill(self, old):
        """kill -9 of the primary, whose last commits no standby has; the agent lives."""
        self.hold_back(old)
        self.cluster.kill_server(old)
        self.cluster.wait('a leader', 60, self.cluster.leader)

    def machine(self, old):
        """The whole machine is gone: agent and server at once, and comes back after the failover."""
        if self.rng.random() < 0.5:
            self.hold_back(old)
        self.cluster.kill_agent(old)
        self.cluster.kill_server(old)
        self.new_leader(old)
        self.cluster.start_agent(old)

    def frozen(self, old):
        """The agent of the primary hangs.  Its server goes on, also after another was promoted."""
        agent = self.cluster.agents[old].pid
        old_port = self.cluster.pg_port[old]
        send(agent, signal.SIGSTOP)
        try:
            new = self.new_leader(old)
            self.cluster.wait('the end of recovery', 60, lambda: not self.is_standby(new))
            promoted = time.monotonic()
            self.load.redeliver(promoted - 3)
            time.sleep(self.split or 1 + self.rng.random() * 2)
        finally:
            send(agent, signal.SIGCONT)
        self.cluster.wait('the old primary to step down', 60, lambda: self.is_standby(old))
        both = [event for event in list(self.ledger.events)
                if event.outcome == 'acked' and event.port == old_port and event.t0 > promoted and event.has_written()]
        self.note = ' (%s acknowledged %d commits after %s was promoted)' % (old, len(both), new)

    def is_standby(self, node):
        """Or it accepts no connection."""
        try:
            return self.cluster.query(node, 'SELECT pg_is_in_recovery()')[0][0]
        except psycopg2.Error:
            return True

    def standby(self, old):
        """kill -9 of a standby; no failover."""
        node = self.rng.choice([node for node in NODES if node != old])
        pid = self.cluster.postmaster(node)
        self.cluster.kill_server(node)
        self.cluster.wait('the standby to come back', 60,
                          lambda: self.cluster.postmaster(node) not in (None, pid))

    def etcd(self, old):
        """Without etcd the primary has to step down."""
        self.cluster.kill_etcd()
        try:
            self.cluster.wait('the primary to step down', 60, lambda: self.is_standby(old))
        finally:
            self.cluster.start_etcd()
        self.cluster.wait('a leader', 60, self.cluster.leader)


class Run:
    """All rounds of one mode, on a cluster of its own."""

    def __init__(self, mode, args, seed):
        self.mode = mode
        self.args = args
        self.rng = random.Random('%s %s' % (seed, mode))
        directory = os.path.join(args.dir, mode)
        is_sync = mode == 'sync' and args.mistake != 'async'
        self.cluster = Cluster(directory, args.bin, is_sync, args.dcs, TIMINGS)
        self.ledger = Ledger(os.path.join(args.dir, 'ledger-%s.jsonl' % mode))
        self.load = None
        self.kinds = {}
        self.failovers = collections.Counter()  # promotions
        self.moved = collections.Counter()      # those of another server
        self.writable = collections.defaultdict(list)
        self.lasted = collections.defaultdict(list)
        self.passed = self.failed = 0
        self.result = None

    def main(self):
        try:
            started = time.monotonic()
            leader = self.cluster.start()
            connection = self.cluster.connect(leader)
            with connection, connection.cursor() as cursor:
                cursor.execute(SCHEMA)
            connection.close()
            self.load = Load(self.cluster, self.ledger, self.rng.random(), self.args.clients, self.args.workers,
                             self.args.pace, self.args.mistake)
            self.load.resume()
            say('%s: three servers after %.1f s' % (self.mode, time.monotonic() - started))
            bag = []
            for number in range(1, self.args.rounds + 1):
                if not bag:
                    bag = list(self.args.faults)
                    self.rng.shuffle(bag)
                self.round(number, bag.pop())
        except (Stuck, psycopg2.Error) as error:
            self.failed += 1
            say('FAILED  %s: %s' % (self.mode, error))
            self.check_stuck()
        finally:
            ignore_signals()
            if self.load:
                self.load.stop()
            self.cluster.stop()
            self.ledger.write()

    def check_stuck(self):
        """What was lost and doubled so far, if there is a primary to compare with."""
        leader = self.cluster.leader()
        if self.load and leader:
            self.check(leader, None).show()

    def acked_more(self, number):
        """Wait until the clients got that many answers more."""
        seen = self.ledger.acked
        self.cluster.wait('answers to the clients', 60,
                          lambda: self.ledger.acked >= seen + number or self.load.failures)

    def round(self, number, kind):
        cluster, ledger = self.cluster, self.ledger
        self.acked_more(80)
        old = cluster.wait('a leader', 60, cluster.leader)
        before = cluster.timeline(old)
        promoted_at = cluster.query(old, 'SELECT clock_timestamp()')[0][0]
        ledger.round = number
        self.kinds[number] = kind
        start = time.monotonic()
        faults = Faults(cluster, ledger, self.load, self.rng, self.args.split)
        faults.run(kind, old)
        self.load.redeliver(start - 3)
        new = cluster.wait('a commit on the new primary', 60, self.has_committed)
        after = cluster.timeline(new)
        failovers = after - before
        if failovers:
            self.failovers[kind] += 1
            self.moved[kind] += new != old
            self.writable[kind].append(min(time for tl, time in ledger.first_on.items() if tl > before) - start)
        restarted = []
        whole = cluster.wait('three servers', 120, lambda: restarted.extend(cluster.restart_ended_agents())
                             or cluster.is_whole(), 0.2)
        back = time.monotonic() - start
        if restarted:
            faults.note += ' (agents ended: %s)' % ' '.join(restarted)
        self.acked_more(80)
        result = self.check(whole, promoted_at if failovers else None)
        now = time.monotonic() - start
        self.lasted[kind].append(now)
        counts = result.counts[number]
        say('%s round %d %s: %s -> %s, timeline %d -> %d, writable after %s s, three servers after %.1f s, %.1f s in all, '
            '%d commits, %d lost, %d acked twice: %s%s' % (
                self.mode, number, kind, old, whole, before, cluster.timeline(whole),
                '%.1f' % self.writable[kind][-1] if failovers else '-', back, now, counts['commits'],
                counts['lost explained'] + counts['lost'], counts['twice explained'] + counts['twice'],
                'FAILED' if result.failed() else 'ok', faults.note))
        result.show()
        self.load.resume()

    def has_committed(self):
        leader = self.cluster.leader()
        try:
            return leader if leader and self.cluster.timeline(leader) in self.ledger.first_on else None
        except psycopg2.Error:
            return None

    # -- the check after a round ------------------------------------------------

    def check(self, leader, promoted_at):
        quiet = self.load.pause('client')
        quiet = self.drain(leader) and self.load.pause('worker') and quiet
        checker = Checker(lambda sql: self.cluster.query(leader, sql), self.ledger, self.mode == 'sync')
        result = checker.check()
        result.rule('every client goes on', [] if quiet and not self.load.failures
                    else [(0, text) for text in self.load.failures or ['a client hangs']])
        result.rule('the background worker is back (W6)', self.worker(leader, promoted_at))
        result.rule('the doctor has no fail (H1)', self.doctor(leader))
        self.result = result
        self.failed += len(result.failed())
        self.passed += len(result.rules) - len(result.failed())
        return result

    def drain(self, leader):
        """The workers empty the queue; each waits for at most a lease and a retry."""
        try:
            self.cluster.wait('the queue to drain', 60, lambda: self.load.failures or not self.cluster.query(
                leader, "SELECT 1 FROM idem.job_status WHERE queue = 'ha' AND state NOT IN ('done', 'dead', 'cancelled') LIMIT 1"))
            return True
        except Stuck:
            return False        # the rules about jobs say which

    def worker(self, leader, since):
        query = self.cluster.query

        def works():
            return query(leader, """
                SELECT 1 FROM idem.worker_status AS w
                  JOIN pg_stat_activity AS a ON a.pid = w.launcher_pid
                  JOIN idem.cleanup_progress AS c ON c.datname = current_database()
                 WHERE w.preloaded AND w.state <> 'failing' AND c.last_error IS NULL
                   AND c.last_finished_at > greatest(%s, pg_postmaster_start_time())""", since)

        try:
            query(leader, "SELECT 1 FROM idem_claim('short', ttl => '1 s')")
            self.cluster.wait('a round of cleanup', 30, works)
            self.cluster.wait('the expired key to be removed', 30, lambda: not query(
                leader, "SELECT 1 FROM idem.keys WHERE key = 'short'"))
        except Stuck as error:
            yield 0, '%s: %s' % (error, query(leader, 'SELECT * FROM idem.worker_status, idem.cleanup_progress'))

    def doctor(self, leader):
        for row in self.cluster.query(leader, 'SELECT "check", detail FROM idem_doctor() WHERE status = \'fail\''):
            yield 0, ': '.join(row)

    # -- the table --------------------------------------------------------------

    def rows(self):
        total = collections.defaultdict(collections.Counter)
        if self.result:
            for number, counts in self.result.counts.items():
                total[self.kinds.get(number, 'before')].update(counts)
        rounds = collections.Counter(self.kinds.values())
        for kind in [*Faults.NAMES, 'before']:
            if kind in total or kind in rounds:
                yield self.row(kind, rounds[kind], (self.failovers[kind], self.moved[kind]), total[kind], self.writable[kind],
                               self.lasted[kind])
        everything = sum(total.values(), collections.Counter())
        yield self.row('all', sum(rounds.values()), (sum(self.failovers.values()), sum(self.moved.values())), everything,
                       sum(self.writable.values(), []), sum(self.lasted.values(), []))

    def outcomes(self):
        """What the clients were told, and what became of commits without an answer."""
        counts = collections.Counter(event.outcome for event in self.ledger.events)
        found = self.result.unknown_found if self.result else 0
        lost = sum((counts['lost open'] for counts in self.result.counts.values()), 0) if self.result else 0
        return ('%s: %d transactions acknowledged, %d refused, %d aborted, %d unknown (the rows of %d of them are there); '
                'WAL positions enclose the fork point for %d of the lost commits' % (
                    self.mode, counts['acked'], counts['refused'], counts['aborted'], counts['unknown'], found, lost))

    def row(self, kind, rounds, failovers, counts, writable, lasted):
        return (self.mode, kind, rounds, *failovers, counts['commits'], counts['claims'],
                counts['twice explained'] + counts['twice'], counts['twice explained'], counts['twice'],
                counts['lost explained'], counts['lost'], counts['old tokens explained'], counts['old tokens'],
                counts['tokens back'], seconds(writable), seconds(lasted))


COLUMNS = ('mode', 'fault', 'rounds', 'promotions', 'of another server', 'commits acked', 'claims acked', 'acked twice', 'explained',
           'not explained', 'lost, explained', 'lost, not', 'old tokens, explained', 'old tokens, not', 'tokens back',
           's until writable', 's per round')


def seconds(values):
    return '%.1f (max %.1f)' % (statistics.median(values), max(values)) if values else '-'


def say(text):
    print(text, flush=True)


def table(rows):
    say('\n| ' + ' | '.join(COLUMNS) + ' |')
    say('|---|---|' + '--:|' * (len(COLUMNS) - 2))
    for row in rows:
        say('| ' + ' | '.join(map(str, row)) + ' |')
    say('')


def interrupt(number, _):
    raise Interrupted(number)


def ignore_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--dir', required=True)
    parser.add_argument('--bin', required=True)
    parser.add_argument('--seed', required=True)
    parser.add_argument('--modes', nargs='+', choices=('async', 'sync'), required=True)
    parser.add_argument('--rounds', type=int, required=True)
    parser.add_argument('--faults', nargs='+', choices=Faults.NAMES, required=True)
    parser.add_argument('--dcs', choices=('etcd', 'etcd3'), default='etcd')
    parser.add_argument('--clients', type=int, default=8)
    parser.add_argument('--workers', type=int, default=3)
    parser.add_argument('--pace', type=float, default=0.1)
    parser.add_argument('--split', type=float, default=0)
    parser.add_argument('--mistake', choices=('', 'newkey', 'async'), default='')
    args = parser.parse_args()
    with open(os.path.join(args.dir, 'ha.pid'), 'w', encoding='utf-8') as file:
        print(os.getpid(), file=file)
    runs = []
    passed = failed = 0
    interrupted = 0
    for mode in args.modes:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, interrupt)
        run = None
        try:
            run = Run(mode, args, args.seed)
            runs.append(run)
            run.main()
        except Interrupted as error:
            interrupted = error.args[0]
            say('Interrupted.')
            break
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed += 1
    table([row for run in runs for row in run.rows()])
    for run in runs:
        say(run.outcomes())
    say('seed %s' % args.seed)
    passed += sum(run.passed for run in runs)
    failed += sum(run.failed for run in runs)
    say('%d passed, %d failed' % (passed, failed))
    return 128 + interrupted if interrupted else failed > 0


if __name__ == '__main__':
    sys.exit(main())
