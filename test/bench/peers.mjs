// test/bench/peers.mjs: enqueue jobs with keys and drain them, with idem or another queue
//
// Use: node peers.mjs idem|pgboss|graphile CLIENTS BATCH JOBS
//
// Prints enqueued and drained jobs per second, bytes of WAL per job, and microseconds of
// CPU per job, client and server.  PGHOST, PGUSER and PGDATABASE choose the database.  There is
// one process with CLIENTS connections that work; with BATCH 1 each job is enqueued, fetched and
// completed on its own, else BATCH at a time.  Every payload is the same, every key is a new UUID,
// and the handler does nothing.  Before the
// drain, the tables get VACUUM ANALYZE, which is not measured.
//
// Each library is used the way its documentation calls fast:
//
// idem: prepared statements by `pg`; fetched with a lease, completed in a transaction of
// its own.
//
// pgboss: a queue of policy `short` (a key absorbs duplicates until its job starts, as
// with idem) with a table of its own (`partition`).  One by one send() and fetch() +
// complete(), because work() with batchSize 1 sleeps half a second between two jobs; in
// batches insert(), and work() with localConcurrency and burstWhenBatchFull.  No
// scheduling, no maintenance.  It keeps finished jobs; their removal days later is not
// counted.
//
// graphile: addJob() or addJobs() with jobKey, run() with concurrency.  In batches
// localQueue.size = BATCH and completeJobBatchDelay = 0, and 24 concurrent jobs, as in
// its published figures.  One more connection, which listens.
import { randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { setImmediate } from 'node:timers/promises';
import pg from 'pg';

const QUEUE = 'bench';
const LEASE = '5 min';
const PAYLOAD = { account: 42, amount: 9900 };

const handler = async () => {};

// call work(i) for i = 0 .. count - 1 from so many loops at once
async function inParallel(loops, count, work) {
  let next = 0;
  const loop = async (worker) => {
    while (next < count) await work(next++, worker);
  };
  await Promise.all(Array.from({ length: loops }, (_, worker) => loop(worker)));
}

async function idem({ clients, batch, keys, batches }) {
  const connections = await Promise.all(Array.from({ length: clients }, async () => {
    const client = new pg.Client();
    await client.connect();
    return client;
  }));
  const call = (worker, name, text, values) => connections[worker].query({ name, text, values });
  const payload = JSON.stringify(PAYLOAD);
  const payloads = Array(batch).fill(payload);

  const enqueueOne = (i, worker) =>
    call(worker, 'enqueue', 'SELECT (idem_enqueue($1, $2, $3)).outcome', [QUEUE, payload, keys[i]]);
  const enqueueMany = (i, worker) =>
    call(worker, 'enqueue',
      "SELECT ord, job_id, outcome FROM idem_enqueue_many($1, $2::jsonb[], $3::text[]) WHERE outcome <> 'enqueued'",
      [QUEUE, payloads, batches[i]]);

  const completeOne = (worker, [job]) =>
    call(worker, 'complete', 'SELECT idem_complete($1, $2)', [job.job_id, job.token]);
  const completeMany = (worker, jobs) =>
    call(worker, 'complete',
      "SELECT job_id, status FROM idem_complete_many($1::bigint[], $2::bigint[]) WHERE status <> 'completed'",
      [jobs.map((job) => job.job_id), jobs.map((job) => job.token)]);

  const drainLoop = async (worker) => {
    for (;;) {
      const { rows } = await call(worker, 'fetch',
        'SELECT job_id, token, attempt, payload, key FROM idem_fetch($1, $2, $3)', [QUEUE, batch, LEASE]);
      if (rows.length === 0) return;
      await Promise.all(rows.map(handler));
      await (batch === 1 ? completeOne : completeMany)(worker, rows);
    }
  };
  return {
    tables: ['idem.jobs'],
    left: 'SELECT count(*) FROM idem.jobs',
    enqueue: () => batch === 1 ? inParallel(clients, keys.length, enqueueOne) :
      inParallel(clients, batches.length, enqueueMany),
    drain: () => Promise.all(connections.map((_, worker) => drainLoop(worker))),
    end: () => Promise.all(connections.map((client) => client.end())),
  };
}

async function pgboss({ clients, batch, keys, batches }) {
  const { PgBoss } = await import('pg-boss');
  const boss = new PgBoss({ host: process.env.PGHOST, max: clients, schedule: false, supervise: false });
  boss.on('error', (error) => { throw error; });
  await boss.start();
  await boss.createQueue(QUEUE, { policy: 'short', partition: true });

  const drainOne = async () => {
    for (;;) {
      const jobs = await boss.fetch(QUEUE);
      if (jobs.length === 0) return;
      await handler(jobs[0]);
      await boss.complete(QUEUE, jobs[0]);
    }
  };
  const drainMany = async () => {
    let handled = 0;
    await new Promise((resolve) => {
      boss.work(QUEUE, { batchSize: batch, localConcurrency: clients, burstWhenBatchFull: true },
        async (jobs) => {
          await Promise.all(jobs.map(handler));
          handled += jobs.length;
          if (handled === keys.length) resolve();
        });
    });
    // waits until the last batches are completed
    await boss.offWork(QUEUE, { wait: true });
  };
  return {
    tables: ['pgboss.job'],
    left: "SELECT count(*) FROM pgboss.job WHERE name = 'bench' AND state <> 'completed'",
    enqueue: () => batch === 1 ?
      inParallel(clients, keys.length, (i) => boss.send(QUEUE, PAYLOAD, { singletonKey: keys[i] })) :
      inParallel(clients, batches.length, (i) =>
        boss.insert(QUEUE, batches[i].map((key) => ({ data: PAYLOAD, singletonKey: key })))),
    drain: () => batch === 1 ? Promise.all(Array.from({ length: clients }, drainOne)) : drainMany(),
    end: () => boss.stop({ graceful: false }),
  };
}

async function graphile({ clients, batch, keys, batches }) {
  const { makeWorkerUtils, run, Logger } = await import('graphile-worker');
  const logger = new Logger(() => (level, message) => {
    if (level === 'error') process.stderr.write(`${message}\n`);
  });
  const makePool = (max) => {
    const pool = new pg.Pool({ max });
    const fail = (error) => { throw error; };
    pool.on('error', fail);
    pool.on('connect', (client) => client.on('error', fail));
    return pool;
  };
  const utilsPool = makePool(clients);
  const utils = await makeWorkerUtils({ pgPool: utilsPool, logger });
  await utils.migrate();

  const pgPool = makePool(clients + 1);

  const drain = async () => {
    let handled = 0;
    let started;
    let allHandled;
    const done = new Promise((resolve) => { allHandled = resolve; });
    const runner = await run({
      pgPool,
      logger,
      noHandleSignals: true,
      preset: {
        worker: {
          concurrentJobs: batch === 1 ? clients : 24,
          localQueue: batch === 1 ? { size: -1 } : { size: batch },
          completeJobBatchDelay: batch === 1 ? -1 : 0,
          failJobBatchDelay: batch === 1 ? -1 : 0,
        },
      },
      taskList: {
        [QUEUE]: async () => {
          started ??= process.hrtime.bigint();
          await handler();
          if (++handled === keys.length) allHandled();
        },
      },
    });
    await done;
    // the last jobs are completed when no connection is busy
    await runner.stop();
    while (pgPool.idleCount < pgPool.totalCount || pgPool.waitingCount > 0) await setImmediate();
    return Number(process.hrtime.bigint() - started) / 1e9;
  };
  return {
    tables: ['graphile_worker._private_jobs'],
    left: 'SELECT count(*) FROM graphile_worker._private_jobs',
    enqueue: () => batch === 1 ?
      inParallel(clients, keys.length, (i) => utils.addJob(QUEUE, PAYLOAD, { jobKey: keys[i] })) :
      inParallel(clients, batches.length, (i) =>
        utils.addJobs(batches[i].map((key) => ({ identifier: QUEUE, payload: PAYLOAD, jobKey: key })))),
    drain,
    end: async () => {
      await utils.release();
      await utilsPool.end();
      await pgPool.end();
    },
  };
}

const [name, clients, batch, count] = process.argv.slice(2).map((arg, i) => (i > 0 ? Number(arg) : arg));
const systems = { idem, pgboss, graphile };
const keys = Array.from({ length: count }, () => randomUUID());
const batches = Array.from({ length: Math.ceil(count / batch) }, (_, i) => keys.slice(i * batch, (i + 1) * batch));

const admin = new pg.Client({ user: 'postgres' });
await admin.connect();
const value = async (sql) => Object.values((await admin.query(sql)).rows[0])[0];
const wal = async () => Number(await value("SELECT pg_current_wal_insert_lsn() - '0/0'"));

// microseconds of CPU, of this process and of the server for it; NaN where the kernel does not report it
async function cpu() {
  const { user, system } = process.cpuUsage();
  const { rows } = await admin.query("SELECT pid FROM pg_stat_activity WHERE usename = 'bench'");
  try {
    const times = rows.map(({ pid }) => Number(readFileSync(`/proc/${pid}/schedstat`, 'ascii').split(' ')[0]));
    return times.reduce((sum, time) => sum + time / 1000, user + system);
  } catch {
    return NaN;
  }
}

// what a step takes; where it knows better when it began, its word about the seconds counts
async function measure(step) {
  const before = { wal: await wal(), cpu: await cpu() };
  const start = process.hrtime.bigint();
  const measured = await step();
  const seconds = typeof measured === 'number' ? measured : Number(process.hrtime.bigint() - start) / 1e9;
  return { seconds, wal: (await wal()) - before.wal, cpu: (await cpu()) - before.cpu };
}

const system = await systems[name]({ clients, batch, keys, batches });
const enqueued = await measure(system.enqueue);
const waiting = await value(system.left);
await admin.query(`VACUUM ANALYZE ${system.tables.join(', ')}`);
const drained = await measure(system.drain);
const left = await value(system.left);
await system.end();
await admin.end();
if (Number(waiting) !== count || Number(left) !== 0) {
  throw new Error(`${name}: ${waiting} of ${count} jobs were enqueued, ${left} were left`);
}
const results = {
  enqueue: count / enqueued.seconds,
  drain: count / drained.seconds,
  wal: (enqueued.wal + drained.wal) / count,
  cpu: (enqueued.cpu + drained.cpu) / count,
};
for (const [what, figure] of Object.entries(results)) {
  if (!Number.isNaN(figure)) process.stdout.write(`${what} ${figure}\n`);
}
