// Prisma, with the driver adapter for node-postgres (test/drivers/run generates the client)
import { PrismaPg } from '@prisma/adapter-pg'
import client from './prisma-client/index.js'
import { fact, state, url } from './facts.mjs'

const prisma = new client.PrismaClient({ adapter: new PrismaPg({ connectionString: url }) })
const claim = (tx, key, request) =>
  tx.$queryRaw`SELECT status, result FROM idem_claim(${key}, request => ${JSON.stringify(request)}::jsonb)`.then((rows) => rows[0])
const get = async (key) => (await prisma.$queryRaw`SELECT status, result FROM idem_get(${key})`)[0]

const first = await prisma.$transaction(async (tx) => {
  const row = await claim(tx, 'pr', { a: 1 })
  await tx.$queryRaw`SELECT idem_finish(${'pr'}, ${JSON.stringify([1])}::jsonb)`
  return row
})
fact('$transaction(async (tx) => tx.$queryRaw`…`) returns rows', first.status, 'claimed')
fact('a jsonb result is a value', (await claim(prisma, 'pr', { a: 1 })).result, [1])
const where = (error) => [error.code, error.meta?.driverAdapterError?.cause?.originalCode]
fact('SQLSTATE: error.meta.driverAdapterError.cause.originalCode, with error.code P2010', await state(() => claim(prisma, 'pr', { a: 2 }), where), ['P2010', 'ID001'])
const [{ token }] = await prisma.$queryRaw`SELECT token FROM idem_lease(${'prl'}, ${'30 s'}::interval)`
fact('a token is a BigInt', typeof token, 'bigint')
fact('… to be passed on as it is', await prisma.$queryRaw`SELECT idem_finish('prl', '1', ${token})`, [{ idem_finish: true }])
fact('… JSON.stringify() refuses it', await state(async () => JSON.stringify({ token }), (error) => error.name), 'TypeError')

await prisma.$queryRaw`SELECT 1 FROM idem_enqueue('prw')`
fact('$queryRaw`CALL idem_wait`', await prisma.$queryRaw`CALL idem_wait(${'prw'}, '30 s')`, [{ ready: true }])
fact('CALL idem_wait in a $transaction: 25001', (await state(() => prisma.$transaction((tx) => tx.$queryRaw`CALL idem_wait('prw')`), where))[1], '25001')

const swallow = (last) => prisma.$transaction(async (tx) => {
  await claim(tx, 'pr3', 1)
  await state(() => tx.$queryRaw`SELECT 1 / 0`)
  if (last) await tx.$queryRaw`SELECT idem_finish('pr3')`
})
fact('an error that was swallowed: $transaction() resolves', await state(() => swallow(false), where), 'no error')
fact('… and the claim is gone', await get('pr3'), undefined)
fact('idem_finish as the last statement notices it', (await state(() => swallow(true), where))[1], '25P02')

const slow = prisma.$transaction(async (tx) => {
  await claim(tx, 'pr4', 1)
  await tx.$queryRaw`SELECT 1 FROM pg_sleep(0.3)`
  await tx.$queryRaw`SELECT idem_finish('pr4')`
}, { timeout: 100 })
fact('a transaction that takes longer than timeout (default 5 s) fails: P2028', (await state(() => slow, where))[0], 'P2028')
fact('… and the claim is gone', await get('pr4'), undefined)
await prisma.$disconnect()
