// Drizzle (on node-postgres)
import { sql } from 'drizzle-orm'
import { drizzle } from 'drizzle-orm/node-postgres'
import pg from 'pg'
import { fact, state, url } from './facts.mjs'

const pool = new pg.Pool({ connectionString: url })
const db = drizzle(pool)
const ask = async (on, query) => (await on.execute(query)).rows[0]
const claim = (key, request) => sql`SELECT status, result, expires_at FROM idem_claim(${key}, request => ${JSON.stringify(request)}::jsonb)`

const first = await db.transaction(async (tx) => {
  const row = await ask(tx, claim('dz', { a: 1 }))
  await ask(tx, sql`SELECT idem_finish(${'dz'}, ${JSON.stringify([1])}::jsonb)`)
  return row
})
fact('db.transaction(tx => tx.execute(sql`…`).rows)', first.status, 'claimed')
fact('a jsonb result is a value', (await ask(db, claim('dz', { a: 1 }))).result, [1])
fact('a timestamp is a string', typeof first.expires_at, 'string')
const cause = (error) => error.cause?.code
fact('SQLSTATE: error.cause.code', await state(() => ask(db, claim('dz', { a: 2 })), cause), 'ID001')
const { token } = await ask(db, sql`SELECT token FROM idem_lease(${'dzl'}, ${'30 s'}::interval)`)
fact('a token is a string', typeof token, 'string')
fact('… to be passed on as it is', (await ask(db, sql`SELECT idem_finish('dzl', '1', ${token})`)).idem_finish, true)
const list = ['1', '2']
fact('an array in sql`` becomes ($1, $2): 42846 with two', await state(() => ask(db, sql`SELECT ${list}::bigint[]`), cause), '42846')
fact('… sql.param(array) makes it one parameter', (await ask(db, sql`SELECT ${sql.param(list)}::bigint[] AS a`)).a, list)

await ask(db, sql`SELECT FROM idem_enqueue('dzw')`)
fact('db.execute(sql`CALL idem_wait`)', await ask(db, sql`CALL idem_wait(${'dzw'}, '30 s')`), { ready: true })
fact('CALL idem_wait in a transaction: 25001', await state(() => db.transaction((tx) => ask(tx, sql`CALL idem_wait('dzw')`)), cause), '25001')

const swallow = (last) => db.transaction(async (tx) => {
  await ask(tx, sql`SELECT FROM idem_claim('dz3')`)
  await state(() => ask(tx, sql`SELECT 1 / 0`))
  if (last) await ask(tx, sql`SELECT idem_finish('dz3')`)
})
fact('an error that was swallowed: transaction() resolves', await state(() => swallow(false), cause), 'no error')
fact('… and the claim is gone', await ask(db, sql`SELECT status FROM idem_get('dz3')`), undefined)
fact('idem_finish as the last statement notices it', await state(() => swallow(true), cause), '25P02')

await db.transaction(async (tx) => {
  await ask(tx, sql`SELECT FROM idem_claim('dz4')`)
  await state(() => tx.transaction((inner) => ask(inner, sql`SELECT 1 / 0`)))
  await ask(tx, sql`SELECT idem_finish('dz4', '402')`)
})
fact('tx.transaction() is a savepoint: the claim stays', (await ask(db, sql`SELECT result FROM idem_get('dz4')`)).result, 402)
await pool.end()
