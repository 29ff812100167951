// Run work once per idempotency key, with the PostgreSQL extension idem and node-postgres.
//
// once():   the work is in the database. Key, work and result commit in one transaction.
// leased(): the work leaves the database (a mail, a card). A lease keeps others out, a token keeps a late worker out.
//
// The pool is a pg.Pool, with `pipeline: true` if possible (pg 8.23 or later: queries that are not awaited share a
// round trip), and with an error listener: pool.on('error', () => {}). Without it a connection that is lost while
// idle ends the process. This module needs no session state and no prepared statements, so pgbouncer may be between.
import { randomUUID } from 'node:crypto'
import { hostname } from 'node:os'
import { setTimeout as sleep } from 'node:timers/promises'

// Another request with this key runs now. Ask again after retryAfter seconds.
export class Busy extends Error {
  constructor(seconds) {
    super('another request with this key is being processed')
    this.retryAfter = Math.max(1, Number(seconds ?? 1))
  }
}
// The key was used with another request (ID001).
export class Mismatch extends Error {}
// Another worker has taken over (ID003). Nothing of this attempt was stored.
export class Stale extends Error {}
// The key is parked or has no attempts left: an operator has to decide.
export class Undecided extends Error {}
// Throw it in the work: its changes are rolled back, and the result is stored like any other.
export class Refusal extends Error {
  constructor(result) {
    super('refused')
    this.result = result
  }
}
// Throw it in the call of leased() if nothing has happened outside: the lease is released at once.
export class NotDone extends Error {}

// Call a function of idem and return its rows. Only errors of idem's own functions get a meaning; the same
// SQLSTATE from the work stays what it is. A bigint (token, job_id) is a string in node-postgres: pass it on as such.
export async function ask(client, sql, args) {
  try {
    return (await client.query(sql, args)).rows
  } catch (error) {
    if (error.code === 'ID001') throw new Mismatch(error.message, { cause: error })
    if (error.code === 'ID003') throw new Stale(error.message, { cause: error })
    throw error
  }
}

// work(client), once more if the connection was lost or the server asks for it (40001, 40P01). A COMMIT whose
// answer was lost may have happened. The key knows: the work asks it first, each time.
export async function again(pool, work, tries = 8) {
  for (let n = 1; ; n++) {
    let client
    let lost = false
    const listener = () => (lost = true) // an 'error' event without a listener would end the process
    try {
      client = await pool.connect()
      client.on('error', listener)
      return await work(client)
    } catch (error) {
      lost ||= /^(08|57P0)/.test(error?.code)
      const retry = !client || lost || error?.code === '40001' || error?.code === '40P01'
      if (n === tries || !retry) throw error
    } finally {
      client?.off('error', listener)
      client?.release(lost)
    }
    await sleep((0.5 + Math.random() / 2) * Math.min(2000, 50 * 2 ** n))
  }
}

export const autocommit = (pool, sql, args) => again(pool, (client) => ask(client, sql, args))

// For a key that is busy: who holds it, if this role may know. One line for each holder.
export async function printHolders(pool, key, scope = null) {
  const [{ lines }] = await autocommit(
    pool,
    `SELECT string_agg(concat_ws(', ', 'key held by ' || kind, 'process ' || pid, 'worker ' || worker,
       'since ' || since) || ': ' || detail, E'\\n') AS lines FROM idem_holder($1, $2)`,
    [key, scope],
  )
  if (lines) console.log(lines)
}

// Wait until the job has ended. Returns its state; if the time is over, prints why the job has not ended.
export async function waitForJob(pool, jobId, seconds = 30) {
  const [{ state }] = await autocommit(pool, 'CALL idem_wait_job($1::bigint, $2)', [jobId, `${seconds} s`])
  if (!['done', 'dead', 'cancelled', 'gone'].includes(state)) { // gone: done, and its queue does not keep it
    const [{ lines }] = await autocommit(
      pool,
      `SELECT string_agg(concat_ws(', ', format('job %s %s', $1::bigint, reason), 'process ' || pid,
         'since ' || since) || ': ' || detail, E'\\n') AS lines FROM idem_why($1::bigint)`,
      [jobId],
    )
    console.log(lines)
  }
  return state
}

export function transaction(pool, work) {
  return again(pool, async (client) => {
    try {
      return await work(client)
    } catch (error) {
      await client.query('ROLLBACK').catch(() => {}) // or the next user of the connection gets an open transaction
      throw error
    }
  })
}

// Statements sent in one round trip: wait for all, then return or throw what this one says. (Promise.all() would
// throw the 25P02 of a statement after the one that failed.)
export async function together(sent, index) {
  await Promise.allSettled(sent)
  return sent[index]
}

// COMMIT of a transaction that has failed answers ROLLBACK, and that is no error: look at the tag.
export async function commit(client) {
  const { command } = await client.query('COMMIT')
  if (command !== 'COMMIT') throw new Error('the transaction was rolled back at its COMMIT')
}

// fn(client) in the transaction that claims the key; returns { result, replayed }. request and the result are
// anything that JSON.stringify takes. fn must neither commit nor roll back, and await all its queries.
export function once(pool, key, request, fn, { scope = null, ttl = null, wait = '0' } = {}) {
  return transaction(pool, async (client) => {
    const sent = [
      client.query('BEGIN'),
      ask(
        client,
        `SELECT claimed, status, result FROM idem_claim($1, request => $2::jsonb, ttl => $3::interval,
           wait => $4::interval, scope => $5)`,
        [key, JSON.stringify(request), ttl, wait, scope],
      ),
      client.query('SAVEPOINT idem_work'),
    ]
    const [claim] = await together(sent, 1)
    if (!claim.claimed) {
      await client.query('ROLLBACK')
      return notClaimed(claim)
    }
    let result
    try {
      result = await fn(client)
    } catch (error) {
      if (!(error instanceof Refusal)) throw error
      await client.query('ROLLBACK TO SAVEPOINT idem_work') // not the claim: it has to be stored
      result = error.result
    }
    await ask(client, 'SELECT idem_finish($1, $2::jsonb, scope => $3)', [key, JSON.stringify(result), scope])
    await commit(client)
    return { result, replayed: false }
  })
}

function notClaimed(row) {
  if (row.status === 'finished') return { result: row.result, replayed: true }
  if (row.status === 'busy') throw new Busy(row.seconds)
  throw new Undecided(row.status)
}

// call(lease) outside of any transaction, then record(client, what call returned) in the one that finishes the key.
// The lease (in seconds) is renewed while call runs; lease.signal aborts when another worker has taken over. The
// outside call may happen twice: pass the key on.
export async function leased(pool, key, request, call, record, options = {}) {
  const { lease = 30, scope = null, ttl = null, maxAttempts = null } = options
  // Unique: if the answer is lost, asking again with the same name gives the same lease.
  const worker = `${hostname()}:${process.pid}:${randomUUID()}`
  const [row] = await autocommit(
    pool,
    `SELECT *, ceil(extract(epoch FROM lease_until - clock_timestamp())) AS seconds
       FROM idem_lease($1, $2::interval, request => $3::jsonb, ttl => $4::interval, worker => $5,
         max_attempts => $6::int, scope => $7)`,
    [key, `${lease} s`, JSON.stringify(request), ttl, worker, maxAttempts, scope],
  )
  if (!row.claimed) return notClaimed(row)
  const { token } = row
  const renew = () =>
    autocommit(pool, 'SELECT idem_renew($1, $2::bigint, $3::interval, $4)', [key, token, `${lease} s`, scope])
  try {
    // The renewal ends before the fence: a renewal from another session would wait for the fence.
    const outcome = await heartbeat(lease / 3, renew, (signal) => call({ ...row, signal }))
    return await finishLease(pool, key, token, scope, (client) => record(client, outcome))
  } catch (error) {
    if (error instanceof NotDone) {
      await autocommit(pool, 'SELECT idem_release($1, $2::bigint, $3)', [key, token, scope])
    }
    if (!(error instanceof Refusal)) throw error
    return finishLease(pool, key, token, scope, () => error.result)
  }
}

function finishLease(pool, key, token, scope, write) {
  return transaction(pool, async (client) => {
    await client.query('BEGIN')
    try {
      await ask(client, 'SELECT idem_fence($1, $2::bigint, $3)', [key, token, scope])
    } catch (error) {
      if (error.code !== 'ID004') throw error
      await client.query('ROLLBACK') // finished: our COMMIT happened, its answer was lost
      const [stored] = await ask(client, 'SELECT result FROM idem_get($1, $2)', [key, scope])
      return { result: stored.result, replayed: false }
    }
    const result = await write(client)
    const finish = 'SELECT idem_finish($1, $2::jsonb, $3::bigint, $4)'
    await ask(client, finish, [key, JSON.stringify(result), token, scope])
    await commit(client)
    return { result, replayed: false }
  })
}

// work(signal), with beat() every so many seconds meanwhile. If beat throws Stale, the signal aborts the work.
export async function heartbeat(seconds, beat, work) {
  const stale = new AbortController()
  let beating = null
  const timer = setInterval(() => {
    beating ??= beat()
      .catch((error) => error instanceof Stale && stale.abort(error)) // another error says nothing about the lease: again
      .finally(() => (beating = null))
  }, seconds * 1000)
  try {
    return await work(stale.signal)
  } finally {
    clearInterval(timer)
    await beating
    stale.signal.throwIfAborted()
  }
}
