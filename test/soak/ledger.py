"""The ledger: what the clients of the soak test write down, and how.

A client notes every answer of idem in soak.ledger, in the transaction that got the
answer.  So the row is there exactly if that transaction has committed, whatever became
of the client.  Columns that the checker goes by:

	ord	from a sequence, taken after the answer.  An answer that locks or changes a job
		keeps its row lock until the transaction ends, so ord gives the order of such
		answers about one job.
	xid	the transaction
	snap	the snapshot of the statement, taken before idem is called
	t0, t1	a time before the call and one after it
"""

import json

SCHEMA = """
CREATE SCHEMA soak;
CREATE SEQUENCE soak.ord;
CREATE TABLE soak.ledger (
	ord bigint,
	xid xid8,
	snap pg_snapshot,
	t0 timestamptz,
	t1 timestamptz,
	who text,
	what text,
	queue text,
	key text,
	job_id bigint,
	token bigint,
	attempt integer,
	n bigint,
	digest text,
	result text,
	outcome text,
	args jsonb);
"""

# Discipline of a queue: which enqueues its keys get, and so what is checked.
#	exclusive: until_executed
#	rerun: until_executed, if_running => 'rerun'
#	expired: until_expired
#	mixed: everything
#	brief: until_executing; history is not kept, and no job is dead for want of attempts
QUEUES = {
    'exclusive': {'max_attempts': 3, 'backoff': '30 ms', 'backoff_max': '300 ms',
                  'debounce_max': '1 s', 'keep': '1 day', 'dedup': 'until_executed'},
    'rerun': {'max_attempts': 8, 'backoff': '50 ms', 'backoff_max': '400 ms',
              'debounce_max': '1 s', 'keep': '1 day', 'dedup': 'until_executed',
              'if_running': 'rerun'},
    'expired': {'max_attempts': 2, 'backoff': '20 ms', 'backoff_max': '200 ms',
                'debounce_max': '1 s', 'dedup': 'until_expired', 'key_ttl': '2 s'},
    'mixed': {'max_attempts': 3, 'backoff': '20 ms', 'backoff_max': '200 ms',
              'debounce_max': '1 s', 'keep': '1 day'},
    'brief': {'max_attempts': 100000, 'backoff': '20 ms', 'backoff_max': '100 ms',
              'debounce_max': '500 ms', 'keep': '1 s', 'keep_dead': '1 s'},
}

NOTE = """
WITH c AS MATERIALIZED ({call})
INSERT INTO soak.ledger (ord, xid, snap, t0, t1, who, what, args{names})
SELECT nextval('soak.ord'), pg_current_xact_id(), pg_current_snapshot(),
	   statement_timestamp(), clock_timestamp(), %(note_who)s, %(note_what)s,
	   %(note_args)s{values}
  FROM c
RETURNING {returning}
"""


def note(cursor, who, what, call, params, columns, args=None):
    """Call idem and note its answer, in one statement.

    call is a SELECT, columns maps columns of the ledger to expressions over its row c.
    Returns the rows noted, as tuples of these columns.
    """
    names = list(columns)
    params = dict(params, note_who=who, note_what=what, note_args=json.dumps(args or {}))
    cursor.execute(NOTE.format(
        call=call,
        names=''.join(', ' + name for name in names),
        values=''.join(', ' + columns[name] for name in names),
        returning=', '.join(names)), params)
    return cursor.fetchall()


def install(cursor):
    cursor.execute(SCHEMA)
    for queue, settings in QUEUES.items():
        arguments = ', '.join('%s => %%(%s)s' % (name, name) for name in settings)
        cursor.execute('SELECT idem_queue_set(%%(queue)s, %s)' % arguments,
                       dict(settings, queue=queue))
