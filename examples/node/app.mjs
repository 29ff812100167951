// The example program: a shop that charges, mails and indexes each order once.
//
// app.mjs serve PORT | app.mjs work; DATABASE_URL and WORKER_URL name the database.
import express from 'express'
import pg from 'pg'
import { Refusal, waitForJob } from './idem.mjs'
import { idempotency, keepBody } from './idem_http.mjs'
import { Worker } from './idem_worker.mjs'

function openPool(connectionString) {
  const pool = new pg.Pool({ connectionString, max: 10, pipeline: true })
  pool.on('error', () => {}) // a connection that is lost while idle
  return pool
}

// It stands for a mail server: a connection of its own, in autocommit.
async function sendMail(connectionString, to, gate) {
  const client = new pg.Client({ connectionString })
  await client.connect()
  try {
    await client.query("INSERT INTO outside (what) VALUES ('mail:' || $1)", [to])
    if (gate !== undefined) await client.query('SELECT pg_advisory_lock($1), pg_advisory_unlock($1)', [gate])
  } finally {
    await client.end()
  }
}

function makeApp(pool, url) {
  const app = express()
  const idempotent = idempotency(pool, { scope: (req) => req.get('X-Customer') }) // stands for a login
  app.use(express.json({ verify: keepBody }))
  app.get('/health', (req, res) => res.send('ok'))

  const charge = idempotent.once(async (client, req) => {
    const { order, cents, gate, fail } = req.body
    const insert = 'INSERT INTO charges (order_id, cents) VALUES ($1, $2) RETURNING id::int'
    const { id } = (await client.query(insert, [order, cents])).rows[0]
    if (gate !== undefined) await client.query('SELECT pg_advisory_xact_lock($1)', [gate])
    if (fail === 'throw') throw new Error('asked to throw')
    if (fail === 'denied') await client.query('SELECT * FROM forbidden')
    if (fail === 'swallow') await client.query('SELECT * FROM forbidden').catch(() => {}) // a mistake: the transaction has failed
    if (cents > 100000) throw new Refusal({ status: 402, body: { error: 'too much' } })
    return { status: 201, headers: { Location: `/charges/${id}` }, body: { order, charge_id: id, cents } }
  })
  app.post('/charges', charge)
  app.put('/charges', charge)

  app.post('/mails', idempotent.leased(
    (lease, req) => sendMail(url, req.body.to, req.body.gate),
    async (client, req) => {
      await client.query('INSERT INTO sent (recipient) VALUES ($1)', [req.body.to])
      return { status: 201, body: { sent: req.body.to } }
    },
    { lease: 10 },
  ))

  app.post('/orders/:id/touch', async (req, res) => {
    const id = Number(req.params.id)
    const client = await pool.connect()
    let job
    try {
      await client.query('BEGIN')
      await client.query('UPDATE orders SET version = version + 1 WHERE id = $1', [id])
      const enqueue = "SELECT job_id FROM idem_enqueue('index', $1::jsonb, key => $2)"
      job = (await client.query(enqueue, [{ order: id }, `order:${id}`])).rows[0]
      await client.query(req.body.rollback ? 'ROLLBACK' : 'COMMIT')
    } catch (error) {
      await client.query('ROLLBACK').catch(() => {})
      throw error
    } finally {
      client.release()
    }
    if (req.body.rollback) return res.status(409).json({ touched: null })
    const state = 'wait' in req.body ? await waitForJob(pool, job.job_id, req.body.wait) : 'done'
    res.status(['done', 'gone'].includes(state) ? 200 : 202).json({ touched: id })
  })
  return app
}

async function indexOrder(client, job) {
  // Two runs of one key can overlap. The lock puts them in order: the later one reads the later version.
  const read = 'SELECT id, version FROM orders WHERE id = $1 FOR NO KEY UPDATE'
  const { id, version } = (await client.query(read, [job.payload.order])).rows[0]
  const write = 'INSERT INTO indexed VALUES ($1, $2) ON CONFLICT (order_id) DO UPDATE SET version = excluded.version'
  await client.query(write, [id, version])
}

async function work(url) {
  const pool = openPool(url)
  // At each start: the next tick stays as it is.
  await pool.query("SELECT idem_schedule('heal', 'heal', every => '1 hour')")
  const worker = new Worker(pool, { wait: 60, lease: 10 })
  worker.transaction('index', indexOrder)
  worker.transaction('heal', (client) => client.query('SELECT enqueue_stale_orders()'))
  worker.leased('mail', async (job) => {
    if (job.attempt <= (job.payload.fail ?? 0)) throw new Error('asked to fail')
    await sendMail(url, job.payload.to, job.payload.gate)
  })
  process.once('SIGTERM', () => {
    worker.stop()
    console.log('stopping')
  })
  console.log('ready')
  await worker.run()
  process.exit(0)
}

if (process.argv[2] === 'serve') {
  const url = process.env.DATABASE_URL
  makeApp(openPool(url), url).listen(Number(process.argv[3]), '127.0.0.1', () => console.log('ready'))
} else {
  await work(process.env.WORKER_URL)
}
