// A worker for the queues of idem, on top of idem.mjs.
//
//   const worker = new Worker(pool)
//   worker.transaction('index', handler)           // handler(client, job): job and work commit together
//   worker.leased('mail', handler)                 // handler(job, signal): the work leaves the database
//   process.once('SIGTERM', () => worker.stop())
//   await worker.run()                             // until stop(): ends what runs, gives back the rest
//
// A handler that throws fails the job: it is retried with the backoff of its queue. When there is nothing to do, the
// worker waits in the server, and the commit of the next job wakes it.
import { hostname } from 'node:os'
import { setTimeout as sleep } from 'node:timers/promises'
import { Stale, ask, autocommit, commit, heartbeat, together, transaction } from './idem.mjs'

export class Worker {
  #stopping = new AbortController()
  #inTransaction = new Map()
  #withLease = new Map()

  // The longest wait for a job, in seconds; jobs per fetch and seconds of the lease, for the queues with a lease.
  constructor(pool, { wait = 30, batch = 10, lease = 30, name = `${hostname()}:${process.pid}` } = {}) {
    Object.assign(this, { pool, wait, batch, lease, name })
  }

  transaction(queue, handler) {
    this.#inTransaction.set(queue, handler)
  }

  leased(queue, handler) {
    this.#withLease.set(queue, handler)
  }

  stop() {
    this.#stopping.abort()
  }

  // One loop per mode, so that a slow call outside does not keep the other queues waiting.
  async run() {
    const loops = []
    if (this.#inTransaction.size) loops.push(this.#loop(() => this.#one(), this.#inTransaction))
    if (this.#withLease.size) loops.push(this.#loop(() => this.#several(), this.#withLease))
    await Promise.all(loops)
  }

  async #loop(round, handlers) {
    const { signal } = this.#stopping
    while (!signal.aborted) {
      try {
        if (!(await round())) await this.#wait([...handlers.keys()])
      } catch (error) {
        console.error('worker:', error.message) // the server is away, say: try again, with jitter
        await sleep((0.5 + Math.random()) * 1000, null, { signal }).catch(() => {})
      }
    }
  }

  // Until a commit lets a job go. The session has no transaction while it waits. stop() closes the connection, and the
  // server ends the wait. (With pipeline: true, client.end() would wait for the query.)
  async #wait(queues) {
    const { signal } = this.#stopping
    const client = await this.pool.connect()
    const close = () => client.connection.stream.destroy()
    const ignore = () => {} // an 'error' event without a listener would end the process; the query is rejected, too
    let failure
    client.on('error', ignore)
    signal.addEventListener('abort', close)
    try {
      if (!signal.aborted) await client.query('CALL idem_wait_any($1, $2)', [queues, `${this.wait} s`])
    } catch (error) {
      failure = error
    }
    signal.removeEventListener('abort', close)
    if (!failure) client.off('error', ignore)
    client.release(failure !== undefined)
    if (failure && !signal.aborted) throw failure
  }

  // Fetch, work and complete in one transaction: a crash gives the job back.
  #one() {
    const queues = [...this.#inTransaction.keys()].sort(() => Math.random() - 0.5)
    return transaction(this.pool, async (client) => {
      const fetch = `SELECT f.* FROM unnest($1::text[]) AS q, LATERAL idem_fetch(q, lease => '0', worker => $2) AS f LIMIT 1`
      const [job] = await together([client.query('BEGIN'), ask(client, fetch, [queues, this.name])], 1)
      if (!job) {
        await client.query('ROLLBACK')
        return false
      }
      // A plain ROLLBACK would undo the fetch, too: no attempt counted, no backoff.
      await client.query('SAVEPOINT idem_work')
      try {
        await this.#inTransaction.get(job.queue)(client, job)
        await ask(client, 'SELECT idem_complete($1::bigint, $2::bigint)', [job.job_id, job.token])
      } catch (error) {
        await client.query('ROLLBACK TO SAVEPOINT idem_work') // fails if the connection is lost: the job is free again
        await ask(client, 'SELECT idem_fail($1::bigint, $2::bigint, $3)', [job.job_id, job.token, error.message])
      }
      await commit(client)
      return true
    })
  }

  // Fetch with a lease, in autocommit; no transaction is open during the work.
  async #several() {
    const jobs = await autocommit(
      this.pool,
      `SELECT f.* FROM unnest($1::text[]) AS q, LATERAL idem_fetch(q, batch => $2, lease => $3::interval, worker => $4) AS f`,
      [[...this.#withLease.keys()], this.batch, `${this.lease} s`, this.name],
    )
    const held = new Map(jobs.map((job) => [job.job_id, { ...job, lost: new AbortController() }]))
    const beat = async () => {
      const rows = await autocommit(
        this.pool,
        'SELECT job_id, status FROM idem_heartbeat($1::bigint[], $2::bigint[], $3::interval)',
        [[...held.keys()], [...held.values()].map((job) => job.token), `${this.lease} s`],
      )
      for (const { job_id, status } of rows) {
        if (status !== 'renewed') held.get(job_id)?.lost.abort(new Stale('another worker has taken over'))
      }
    }
    await heartbeat(this.lease / 3, beat, async () => {
      for (const job of [...held.values()]) {
        if (this.#stopping.signal.aborted) {
          await this.#end(`SELECT idem_snooze($1::bigint, $2::bigint, '0')`, job) // not begun: the attempt does not count
        } else if (!job.lost.signal.aborted) {
          await this.#call(job)
        }
        held.delete(job.job_id)
      }
    })
    return jobs.length > 0
  }

  async #call(job) {
    try {
      await this.#withLease.get(job.queue)(job, job.lost.signal)
    } catch (error) {
      return this.#end('SELECT idem_fail($1::bigint, $2::bigint, $3)', job, error.message)
    }
    return this.#end('SELECT idem_complete($1::bigint, $2::bigint)', job)
  }

  async #end(sql, job, ...args) {
    try {
      await autocommit(this.pool, sql, [job.job_id, job.token, ...args])
    } catch (error) {
      if (!(error instanceof Stale)) throw error // another worker has the job, or a lost answer: it has ended
    }
  }
}
