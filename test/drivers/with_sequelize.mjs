// Sequelize
import sequelizeModule from 'sequelize'
import { fact, state, url } from './facts.mjs'

const { QueryTypes, Sequelize } = sequelizeModule
const sequelize = new Sequelize(url, { logging: false })
const ask = async (sql, bind, transaction) =>
  (await sequelize.query(sql, { type: QueryTypes.SELECT, bind, transaction }))[0]
const claim = 'SELECT status, result FROM idem_claim($1, request => $2::jsonb)'

const first = await sequelize.transaction(async (t) => {
  const row = await ask(claim, ['sq', { a: 1 }], t)
  await ask('SELECT idem_finish($1, $2::jsonb)', ['sq', JSON.stringify([1])], t)
  return row
})
fact('query(sql, { bind, transaction, type: SELECT }) returns rows; an object is jsonb', first.status, 'claimed')
fact('a jsonb result is a value', (await ask(claim, ['sq', { a: 1 }])).result, [1])
const original = (error) => error.original?.code
fact('SQLSTATE: error.original.code', await state(() => ask(claim, ['sq', { a: 2 }]), original), 'ID001')
const { token } = await ask('SELECT token FROM idem_lease($1, $2::interval)', ['sql', '30 s'])
fact('a token is a string', typeof token, 'string')
fact('… to be passed on as it is', (await ask("SELECT idem_finish('sql', '1', $1)", [token])).idem_finish, true)

await ask("SELECT FROM idem_enqueue('sqw')")
fact('CALL idem_wait with type: SELECT', await ask("CALL idem_wait($1, '30 s')", ['sqw']), { ready: true })
fact('CALL idem_wait in a transaction: 25001', await state(() => sequelize.transaction((t) => ask("CALL idem_wait('sqw')", [], t)), original), '25001')

await sequelize.transaction(async () => ask("SELECT status FROM idem_claim('sq2')")).catch(() => {})
fact('a query without { transaction } is not in the transaction', (await ask("SELECT status FROM idem_get('sq2')")).status, 'finished')

const swallow = (last) => sequelize.transaction(async (t) => {
  await ask("SELECT FROM idem_claim('sq3')", [], t)
  await state(() => ask('SELECT 1 / 0', [], t))
  if (last) await ask("SELECT idem_finish('sq3')", [], t)
})
fact('an error that was swallowed: transaction() resolves', await state(() => swallow(false), original), 'no error')
fact('… and the claim is gone', await ask("SELECT status FROM idem_get('sq3')"), undefined)
fact('idem_finish as the last statement notices it', await state(() => swallow(true), original), '25P02')

await sequelize.transaction(async (t) => {
  await ask("SELECT FROM idem_claim('sq4')", [], t)
  await state(() => sequelize.transaction({ transaction: t }, (inner) => ask('SELECT 1 / 0', [], inner)))
  await ask("SELECT idem_finish('sq4', '402')", [], t)
})
fact('transaction({ transaction: t }) is a savepoint: the claim stays', (await ask("SELECT result FROM idem_get('sq4')")).result, 402)
await sequelize.close()
