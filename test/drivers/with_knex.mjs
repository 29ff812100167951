// Knex
import knexFactory from 'knex'
import { fact, state, url } from './facts.mjs'

const knex = knexFactory({ client: 'pg', connection: url })
const ask = async (db, sql, args = []) => (await db.raw(sql, args)).rows[0]
const claim = 'SELECT status, result FROM idem_claim(:key, request => :request::jsonb)'

const first = await knex.transaction(async (trx) => {
  const row = await ask(trx, claim, { key: 'kx', request: { a: 1 } })
  await ask(trx, 'SELECT idem_finish(?, ?::jsonb)', ['kx', JSON.stringify([1])])
  return row
})
fact('knex.transaction(trx => trx.raw(…).rows); an object is jsonb', first.status, 'claimed')
fact('a jsonb result is a value', (await ask(knex, claim, { key: 'kx', request: { a: 1 } })).result, [1])
fact('an array is no jsonb parameter: JSON.stringify() it', await state(() => ask(knex, 'SELECT FROM idem_claim(?, request => ?::jsonb)', ['kx2', [1, 2]])), '22P02')
fact('SQLSTATE: error.code', await state(() => ask(knex, claim, { key: 'kx', request: { a: 2 } })), 'ID001')
const { token } = await ask(knex, 'SELECT token FROM idem_lease(?, ?::interval)', ['kxl', '30 s'])
fact('a token is a string', typeof token, 'string')
fact('… to be passed on as it is', (await ask(knex, "SELECT idem_finish('kxl', '1', ?)", [token])).idem_finish, true)

await ask(knex, "SELECT FROM idem_enqueue('kxw')")
fact('knex.raw(CALL idem_wait)', await ask(knex, "CALL idem_wait(?, '30 s')", ['kxw']), { ready: true })
fact('CALL idem_wait in a transaction: 25001', await state(() => knex.transaction((trx) => ask(trx, "CALL idem_wait('kxw')"))), '25001')

const swallow = (last) => knex.transaction(async (trx) => {
  await ask(trx, "SELECT FROM idem_claim('kx3')")
  await state(() => ask(trx, 'SELECT 1 / 0'))
  if (last) await ask(trx, "SELECT idem_finish('kx3')")
})
fact('an error that was swallowed: transaction() resolves', await state(() => swallow(false)), 'no error')
fact('… and the claim is gone', await ask(knex, "SELECT status FROM idem_get('kx3')"), undefined)
fact('idem_finish as the last statement notices it', await state(() => swallow(true)), '25P02')

await knex.transaction(async (trx) => {
  await ask(trx, "SELECT FROM idem_claim('kx4')")
  await state(() => trx.transaction((inner) => ask(inner, 'SELECT 1 / 0')))
  await ask(trx, "SELECT idem_finish('kx4', '402')")
})
fact('trx.transaction() is a savepoint: the claim stays', (await ask(knex, "SELECT result FROM idem_get('kx4')")).result, 402)
await knex.destroy()
