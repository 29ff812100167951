// node-postgres (pg)
import pg from 'pg'
import { fact, state, url } from './facts.mjs'

const pool = new pg.Pool({ connectionString: url })
pool.on('error', () => {})
const client = await pool.connect()
const ask = async (sql, args) => (await client.query(sql, args)).rows[0]
const claim = 'SELECT status, result FROM idem_claim($1, request => $2, wait => $3)'

await client.query('BEGIN')
fact('an object is a jsonb parameter, a string an interval; no cast', (await ask(claim, ['np', { a: 1 }, '2 s'])).status, 'claimed')
await ask('SELECT idem_finish($1, $2)', ['np', JSON.stringify([1, 2])])
await client.query('COMMIT')
fact('a jsonb result is a value', (await ask(claim, ['np', { a: 1 }, '0'])).result, [1, 2])
fact('an array is no jsonb parameter (22P02): JSON.stringify() it', await state(() => ask(claim, ['np2', [1, 2], '0'])), '22P02')
fact('a string is JSON text: JSON.stringify() it', await state(() => ask(claim, ['np2', 'abc', '0'])), '22P02')
fact('SQLSTATE: error.code', await state(() => ask(claim, ['np', { a: 2 }, '0'])), 'ID001')
fact('SELECT f() gives a string', typeof (await ask("SELECT idem_claim('np')")).idem_claim, 'string')

const { token } = await ask("SELECT token FROM idem_lease('npl', $1)", ['30 s'])
fact('a bigint (token, job_id) is a string', typeof token, 'string')
fact('… to be passed on as it is', (await ask("SELECT idem_finish('npl', '1', $1)", [token])).idem_finish, true)
await ask("SELECT FROM idem_enqueue('np')")
const job = await ask("SELECT job_id, token FROM idem_fetch('np', lease => '5 s')")
const beat = await ask("SELECT status FROM idem_heartbeat($1, $2, '5 s')", [[job.job_id], [job.token]])
fact('arrays of strings are bigint[] parameters', beat.status, 'renewed')

await ask("SELECT FROM idem_enqueue('npw')")
fact('CALL idem_wait returns a row', await ask('CALL idem_wait($1, $2)', ['npw', '30 s']), { ready: true })
fact('an array of strings is an array of queues', await ask('CALL idem_wait_any($1)', [['npnone', 'npw']]), { ready: true, queue: 'npw' })
await client.query('BEGIN')
fact('CALL idem_wait after BEGIN: 25001', await state(() => ask("CALL idem_wait('npw')")), '25001')
await client.query('ROLLBACK')
const waiting = await pool.connect()
const wait = state(() => waiting.query("CALL idem_wait('npnone', '60 s')"), (error) => error.message)
waiting.release(true)
fact('client.release(true) ends a wait', /terminated|closed/.test(await wait), true)

await client.query('BEGIN')
await ask("SELECT FROM idem_claim('np3')")
await state(() => ask('SELECT 1 / 0'))
fact('idem_finish in a failed transaction: 25P02', await state(() => ask("SELECT idem_finish('np3')")), '25P02')
fact('COMMIT of a failed transaction: command is ROLLBACK, no error', (await client.query('COMMIT')).command, 'ROLLBACK')

const query = { text: 'SELECT $1::int', values: [1] }
const unnamed = []
for (let i = 0; i < 20; i++) unnamed.push(await state(() => pool.query(query)))
fact('queries without a name work behind pgbouncer', new Set(unnamed), new Set(['no error']))

// A named query is prepared once per connection; pgbouncer gives the next one another server connection.
const other = await pool.connect()
await client.query({ name: 'one', ...query })
await other.query('BEGIN') // takes the server connection that was used last
await other.query('SELECT 1')
const named = await state(() => client.query({ name: 'one', ...query }))
await other.query('ROLLBACK')
fact('a query with a name behind pgbouncer: 26000', named, '26000')
other.release()
client.release()

// pool.query() takes any connection: BEGIN and claim can land on two of them
const one = await pool.connect()
await one.query('BEGIN')
await pool.query("SELECT FROM idem_claim('np4')")
await one.query('ROLLBACK')
one.release()
fact('pool.query() is not in the transaction of a client', (await pool.query("SELECT status FROM idem_get('np4')")).rows[0].status, 'finished')

const pipelined = new pg.Client({ connectionString: url, pipeline: true })
await pipelined.connect()
const sent = [pipelined.query('BEGIN'), pipelined.query("SELECT status FROM idem_claim('np5')"), pipelined.query('ROLLBACK')]
fact('pipeline: true works behind pgbouncer', (await Promise.all(sent))[1].rows[0].status, 'claimed')
await pipelined.query("SELECT FROM idem_enqueue('npp')")
const behind = [pipelined.query('SELECT 1'), state(() => pipelined.query("CALL idem_wait('npp')"))]
fact('pipeline: true, CALL idem_wait behind another query', (await Promise.all(behind))[1], 'no error')
const piped = state(() => pipelined.query("CALL idem_wait('npnone', '60 s')"), (error) => error.message)
pipelined.on('error', () => {})
pipelined.connection.stream.destroy()
fact('pipeline: true, client.connection.stream.destroy() ends a wait (end() would not)', /terminated|closed/.test(await piped), true)
await pool.end()
