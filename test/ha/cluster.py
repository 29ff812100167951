"""etcd, three Patroni agents and their servers, as plain processes on loopback.

All processes are children of this one, or are found through the process id in the pid file of a
data directory in our temporary directory.  Signals go to process ids only.
"""

import ctypes
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import time

import psycopg2

NODES = ('n1', 'n2', 'n3')
PR_SET_PDEATHSIG = 1


class Stuck(Exception):
    """The cluster has not reached a state in time."""


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(('127.0.0.1', 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def with_parent():
    """In a new child: end with the process that has started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def parent_of(pid):
    try:
        with open('/proc/%d/stat' % pid, encoding='utf-8', errors='replace') as file:
            return int(file.read().rpartition(')')[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def all_pids():
    return [int(name) for name in os.listdir('/proc') if name.isdigit()]


def children(pid):
    return [child for child in all_pids() if parent_of(child) == pid]


def title(pid):
    try:
        with open('/proc/%d/cmdline' % pid, encoding='utf-8', errors='replace') as file:
            return file.read().replace('\0', ' ')
    except OSError:
        return ''


class Cluster:
    def __init__(self, directory, bin_dir, sync, dcs, timings):
        self.dir = directory
        self.bin_dir = bin_dir
        self.sync = sync
        self.dcs = dcs
        self.timings = timings
        self.password = secrets.token_hex(16)
        ports = free_ports(8)
        self.etcd_port, self.etcd_peer = ports[:2]
        self.rest_port = dict(zip(NODES, ports[2:5]))
        self.pg_port = dict(zip(NODES, ports[5:8]))
        self.etcd = None
        self.agents = {}
        os.mkdir(self.dir)

    # -- processes --------------------------------------------------------------

    def spawn(self, name, command):
        log = open(os.path.join(self.dir, name + '.log'), 'ab')
        with log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                    cwd=self.dir, start_new_session=True, preexec_fn=with_parent)

    def start_etcd(self):
        client = 'http://127.0.0.1:%d' % self.etcd_port
        peer = 'http://127.0.0.1:%d' % self.etcd_peer
        self.etcd = self.spawn('etcd', [
            'etcd', '--name', 'etcd', '--data-dir', os.path.join(self.dir, 'etcd'),
            '--listen-client-urls', client, '--advertise-client-urls', client,
            '--listen-peer-urls', peer, '--initial-advertise-peer-urls', peer,
            '--initial-cluster', 'etcd=' + peer, '--enable-v2=true', '--logger', 'zap'])
        self.wait('etcd', 30, lambda: self.http(self.etcd_port, 'GET', '/health')[0] == 200)

    def kill_etcd(self):
        self.etcd.kill()
        self.etcd.wait()

    def start_agent(self, node):
        self.agents[node] = self.spawn('patroni-' + node, ['patroni', self.conf(node)])

    def conf(self, node):
        """The file of settings of an agent; JSON is YAML."""
        path = os.path.join(self.dir, node + '.yml')
        login = {'superuser': {'username': 'postgres', 'password': self.password},
                 'replication': {'username': 'replicator', 'password': self.password}}
        conf = {
            'scope': 'ha', 'namespace': '/idem/', 'name': node,
            'restapi': {'listen': '127.0.0.1:%d' % self.rest_port[node],
                        'connect_address': '127.0.0.1:%d' % self.rest_port[node]},
            self.dcs: {'host': '127.0.0.1:%d' % self.etcd_port},
            'watchdog': {'mode': 'off'},
            'bootstrap': {
                'dcs': {
                    **self.timings,
                    'primary_start_timeout': 0,
                    'maximum_lag_on_failover': 1 << 30,
                    'failsafe_mode': False,
                    'synchronous_mode': self.sync,
                    'synchronous_mode_strict': self.sync,
                    'postgresql': {
                        'use_pg_rewind': True,
                        'parameters': {
                            'shared_preload_libraries': 'idem',
                            'idem.cleanup_naptime': '1s',
                            'max_connections': 60,
                            'wal_keep_size': '1GB',
                            'wal_log_hints': 'on',
                            'autovacuum_naptime': '5s',
                            'log_line_prefix': '%m [%p] %e %a ',
                            'log_error_verbosity': 'terse',
                            'log_min_error_statement': 'panic',
                        }}},
                'initdb': [{'encoding': 'UTF8'}, 'no-locale', 'no-sync']},
            'postgresql': {
                'listen': '127.0.0.1:%d' % self.pg_port[node],
                'connect_address': '127.0.0.1:%d' % self.pg_port[node],
                'data_dir': self.data(node),
                'bin_dir': self.bin_dir,
                'pgpass': os.path.join(self.dir, node + '.pgpass'),
                'authentication': login,
                'basebackup': [{'checkpoint': 'fast'}, 'no-sync'],
                'remove_data_directory_on_rewind_failure': True,
                'remove_data_directory_on_diverged_timelines': True,
                'pg_hba': ['host all all 127.0.0.1/32 scram-sha-256',
                           'host replication replicator 127.0.0.1/32 scram-sha-256'],
                'parameters': {'unix_socket_directories': ''},
            }}
        with open(path, 'w', encoding='utf-8') as file:
            os.chmod(path, 0o600)
            json.dump(conf, file, indent=1)
        return path

    def data(self, node):
        return os.path.join(self.dir, node)

    def postmaster(self, node):
        """Its process id, or None; a number in an old pid file may belong to another process."""
        try:
            with open(os.path.join(self.data(node), 'postmaster.pid'), encoding='utf-8') as file:
                pid = int(file.readline())
            return pid if os.readlink('/proc/%d/cwd' % pid) == self.data(node) else None
        except (OSError, ValueError):
            return None

    def walsenders(self, node):
        return [pid for pid in children(self.postmaster(node)) if 'walsender' in title(pid)]

    def kill_server(self, node):
        """kill -9: the postmaster first, so that it cannot tell the others."""
        pid = self.postmaster(node)
        if pid is None:
            return
        family = children(pid)
        send(pid, signal.SIGKILL)
        for child in family:
            send(child, signal.SIGKILL)

    def kill_agent(self, node):
        """kill -9 of the agent and of what it runs (pg_rewind), but not of the server."""
        agent = self.agents[node]
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()

    def restart_ended_agents(self):
        """Agents that ended by themselves, as an operator's service manager would restart them."""
        ended = [node for node, agent in self.agents.items() if agent.poll() is not None]
        for node in ended:
            self.start_agent(node)
        return ended

    def stop(self):
        for node in list(self.agents):
            self.kill_agent(node)
        for node in NODES:
            self.kill_server(node)
        if self.etcd:
            self.kill_etcd()
        # whatever works in our directory is ours
        for _ in range(100):
            left = self.left_over()
            if not left:
                return
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.1)

    def left_over(self):
        left = []
        for pid in all_pids():
            try:
                if pid != os.getpid() and os.readlink('/proc/%d/cwd' % pid).startswith(self.dir):
                    left.append(pid)
            except OSError:
                pass
        return left

    # -- what is said about them ------------------------------------------------

    @staticmethod
    def http(port, method, path, body=None, timeout=1.0):
        """(status, text); (0, reason) if there is no answer."""
        connection = http.client.HTTPConnection('127.0.0.1', port, timeout=timeout)
        try:
            connection.request(method, path, body and json.dumps(body),
                               {'Content-Type': 'application/json'})
            answer = connection.getresponse()
            return answer.status, answer.read().decode('utf-8', 'replace')
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    def rest(self, node, method, path, body=None, timeout=1.0):
        return self.http(self.rest_port[node], method, path, body, timeout)

    def is_leader(self, node, timeout=0.5):
        return self.rest(node, 'GET', '/primary', timeout=timeout)[0] == 200

    def leader(self, but=None):
        return next((node for node in NODES if node != but and self.is_leader(node)), None)

    def members(self, node):
        status, text = self.rest(node, 'GET', '/cluster')
        return {one['name']: one for one in json.loads(text)['members']} if status == 200 else {}

    def connect(self, node, **more):
        return psycopg2.connect(host='127.0.0.1', port=self.pg_port[node], user='postgres',
                                password=self.password, dbname='postgres', connect_timeout=2, **more)

    def query(self, node, sql, *args):
        connection = self.connect(node)
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                cursor.execute(sql, args or None)
                return cursor.fetchall() if cursor.description else None
        finally:
            connection.close()

    def timeline(self, node):
        return int(self.query(node, 'SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)')[0][0], 16)

    def is_whole(self):
        """The leader, if two standbys stream from it and, in synchronous mode, one is synchronous."""
        leader = self.leader()
        if leader is None:
            return None
        try:
            states = self.query(leader, 'SELECT state, sync_state FROM pg_stat_replication'
                                " WHERE application_name <> 'pg_basebackup'")
        except psycopg2.Error:
            return None
        if sorted(state for state, _ in states) != ['streaming'] * 2:
            return None
        if self.sync and 'sync' not in [sync for _, sync in states]:
            return None
        roles = [one.get('role') for one in self.members(leader).values()]
        if self.sync and 'sync_standby' not in roles:
            return None
        return leader if len(roles) == len(NODES) else None

    def wait(self, what, seconds, condition, pause=0.05):
        """What the condition returns as soon as that is true."""
        end = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > end:
                raise Stuck('waited %d s for %s' % (seconds, what))
            time.sleep(pause)

    def start(self):
        self.start_etcd()
        self.start_agent(NODES[0])
        self.wait('the first primary', 60, self.leader)
        for node in NODES[1:]:
            self.start_agent(node)
        return self.wait('three servers', 90, self.is_whole, 0.2)
